"""The attention of a model by itself: what a pass asks of torch's kernels, so that these can be timed without the model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.backends.torch.flash4 import has_flash4, keep_compiled
from ingot.backends.torch.precision import ATTENTION, CUDNN_FLASH4, FLASH4, GROUPED
from ingot.backends.torch.tuning import Agree
from ingot.model.kernels.flash import library, packed_flash_attention
from ingot.model.layers import Form, causal_attention, repeat_kv, takes_flash
from ingot.model.registry import OURS
from ingot.runtime.batch import Batch


class Operand(NamedTuple):
    """Queries, keys or values: their sizes after the batch's, the order in which their dimensions lie, their number format."""

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype


class Call(NamedTuple):
    """A call of attention: what it is given, and whether that is one product's, whose gradient is made of theirs."""

    query: Operand
    key: Operand
    value: Operand
    packed: bool


Calls = Counter[Call]
ENOUGH = 2**32  # scores of all calls together, 5 ms of an H200 with their gradients: more tell kernels apart no better


@contextmanager
def recorded_attention(model: nn.Module) -> Iterator[Calls]:
    """Count a model's calls of causal attention; others have masks or dropout, which leave no choice or do not train fast.

    None are counted where a model of one's own has fewer heads of keys and values in its own way: only whole passes tell then
    which kernels take them.
    """
    calls: Calls = Counter()
    ours, all_known = isinstance(model, OURS), True
    plain = F.scaled_dot_product_attention

    def recorded(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal all_known
        all_known = all_known and (ours or key.size(1) == query.size(1))
        grouped = kwargs.pop("enable_gqa", False)
        if kwargs == {"is_causal": True, "dropout_p": 0.0} and not args and query.size(-2) == key.size(-2):
            packed = (
                query.dim() == 4
                and query.shape == key.shape == value.shape
                and len({x.untyped_storage().data_ptr() for x in (query, key, value)}) == 1
            )
            calls[Call(_operand(query), _operand(key), _operand(value), packed)] += 1
        if grouped:  # without a kernel that takes fewer heads torch would hold the scores of all pairs
            key, value = repeat_kv(key, query.size(1)), repeat_kv(value, query.size(1))
        return plain(query, key, value, *args, **kwargs)

    F.scaled_dot_product_attention = recorded
    try:
        yield calls
    finally:
        F.scaled_dot_product_attention = plain
        if not all_known:
            calls.clear()


def enough(calls: Calls, rows: int) -> Calls:
    """As many of the calls as it takes to time them for so many rows, in the same proportion, each at least once."""
    scores = sum(rows * math.prod(call.query.sizes[:2]) * call.key.sizes[1] * times for call, times in calls.items())
    return Counter({call: max(1, round(times * min(1.0, ENOUGH / scores))) for call, times in calls.items()})


def candidates(model: nn.Module, calls: Calls, documents: bool, maximum: Agree) -> list[str]:
    """The kernels that calls leave a choice of; without fewer heads of keys and values there is nothing to group.

    Rows of documents are FlexAttention's or FlashAttention 4's.
    """
    takes_flash4 = _takes_flash4(model, maximum)
    if documents:
        return ["default", FLASH4] if takes_flash4 else []
    fewer = any(call.key.sizes[0] != call.query.sizes[0] for call in calls)
    theirs = [*ATTENTION, *(f"{name}{GROUPED}" for name in ATTENTION if fewer)]
    whole = any(getattr(module, "fused_qkv", False) for module in model.modules())  # one operation, by FlashAttention alone
    return [*theirs, FLASH4, *([] if fewer or whole else [CUDNN_FLASH4])] if calls and takes_flash4 else theirs


def without_masks(model: nn.Module, batch: Batch, maximum: Agree) -> list[str]:
    """The kernels that count the windows that such rows have; to others they are masks, for which FlexAttention is compiled."""
    windowed = isinstance(model, OURS) and getattr(model, "windowed", False)
    if not windowed or model.window >= batch.shape[2] or batch.shape[1] == 3:  # type: ignore[operator]
        return []
    grouped = model.kv_heads * model.head_size != model.embedding.weight.size(1)  # type: ignore[operator,union-attr]
    return [FLASH4, *([] if grouped else [CUDNN_FLASH4])] if _takes_flash4(model, maximum) else []


def form_of(name: str) -> Form:
    """How a kernel is given heads."""
    if name == CUDNN_FLASH4:
        return "cudnn-flash4"
    return "flash4" if name == FLASH4 else "grouped" if name.endswith(GROUPED) else "repeated"


def _takes_flash4(model: nn.Module, maximum: Agree) -> bool:
    """Whether the model is one of ours and every rank has the package: all of them try the same kernels."""
    return isinstance(model, OURS) and not maximum([not has_flash4()])[0]


def load_flash4() -> None:
    """Import the package and that of products, which comes with it, where they are installed.

    That takes seconds, for which a run need not wait. What is wrong with them is told later.
    """
    if has_flash4():
        keep_compiled()
        with suppress(Exception):
            library()
            import_module("ingot.model.kernels.quack_products")


def use_form(model: nn.Module, form: Form) -> None:
    """Let the attention of a model have this form."""
    if form.endswith("flash4"):
        keep_compiled()
    for module in model.modules() if isinstance(model, OURS) else ():  # of one's own it may mean anything
        if hasattr(module, "form"):
            module.form = form  # type: ignore[assignment]


def replay(calls: Calls, rows: int, device: torch.device, form: Form = "repeated") -> None:
    """Make the calls for so many rows, each with its backward pass and as often as it was counted."""
    for call, times in calls.items():
        attend = _packed_pass if call.packed else _pass
        again = attend(call, rows, device, form)
        for _ in range(times):
            again()


def _pass(call: Call, rows: int, device: torch.device, form: Form) -> Callable[[], None]:
    q, k, v = (_random(operand, rows, device) for operand in (call.query, call.key, call.value))

    def both_ways() -> None:
        y = causal_attention(q, k, v, form=form)
        torch.autograd.grad(y, (q, k, v), y.detach())

    return both_ways


def _packed_pass(call: Call, rows: int, device: torch.device, form: Form) -> Callable[[], None]:
    """A pass of attention as the gpt2 family calls it: bringing three gradients together is a part of what a kernel costs."""
    heads, length, size = call.query.sizes
    qkv = torch.randn(rows, length, 3, heads, size, dtype=call.query.dtype, device=device, requires_grad=True)

    def both_ways() -> None:
        if takes_flash(form, None):
            y = packed_flash_attention(qkv, cudnn=form != "flash4")
        else:
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
            y = causal_attention(q, k, v, form=form)
        torch.autograd.grad(y, qkv, y.detach())

    return both_ways


def replayed(calls: Calls, rows: int, device: torch.device, form: Form, records: bool) -> Callable[[], None]:
    """The calls, made once, to be made again; with `records` as a CUDA graph, where it can be one: no launch then takes time."""
    run = partial(replay, calls, rows, device, form)
    run()
    with suppress(Exception):
        if records:
            graph = torch.cuda.CUDAGraph()
            # A recording that fails leaves its stream the current one.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                run()
            return graph.replay
    return run


def _operand(x: Tensor) -> Operand:
    return Operand(tuple(x.shape[1:]), tuple(sorted(range(x.dim()), key=x.stride, reverse=True)), x.dtype)


def _random(operand: Operand, rows: int, device: torch.device) -> Tensor:
    empty = torch.empty_permuted((rows, *operand.sizes), operand.order, dtype=operand.dtype, device=device)
    return empty.normal_().requires_grad_()
