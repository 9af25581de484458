"""A step never asks the device for a number: the host would wait for it, and the device then for the host's next launches."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch_kit import ROWS, SEQ_LEN, make, plan_of, rows_of, take

from ingot.backends.torch.tune import KERNELS, use_kernels

GOLF = {"family": "golf", "layers": 2, "heads": 4, "kv_heads": 2, "width": 32}
MUON = {"name": "muon", "ema_decay": 0.9, "clip_norm": 1.0}
NORMUON = {"muon_beta2": 0.95, "muon_cautious": True, "muon_weight_decay": 0.1}
WAITING = (  # operations whose result the host must have, by value or by size
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::unique",
)  # fmt: skip


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.name().split(".")[0]
        if name in WAITING or (name == "aten::index" and any(i is not None and i.dtype == torch.bool for i in args[1])):
            self.seen[name] += 1
        return operation(*args, **(kwargs or {}))


def waits_of(backend, number):
    batch = rows_of(number)
    with Waits() as waits:
        pending = backend.step(batch, ROWS * SEQ_LEN, plan_of(backend, number))
    pending.result()
    return dict(waits.seen)


@pytest.mark.parametrize(
    ("model", "optimizer", "training"),
    [
        (GOLF, MUON, {"micro_batch": 2}),
        (GOLF, {**MUON, **NORMUON}, {}),
        (GOLF, MUON, {"loss_chunk": 16, "gradient_checkpointing": True}),
        ({**GOLF, "family": "llama"}, {"name": "adamw", "clip_norm": 1.0}, {"micro_batch": 3}),
        ({**GOLF, "family": "frontier"}, {**MUON, **NORMUON}, {}),
        ({"family": "gpt2", "layers": 2, "heads": 2, "width": 32, "dropout": 0.1}, {}, {}),
    ],
)
def test_a_step_waits_for_nothing_where_the_device_decides_whether_it_counts(model, optimizer, training):
    backend = make(model, optimizer, **training)
    backend._host_skips = False  # as on CUDA, where the loss is a kernel too; the CPU's own asks what it may leave out
    use_kernels(backend.model, KERNELS)
    assert [waits_of(backend, number) for number in range(3)] == [{}, {}, {}]


def test_where_the_host_decides_it_asks_once():
    backend = make(GOLF, MUON)
    use_kernels(backend.model, KERNELS)
    assert [sum(waits_of(backend, number).values()) for number in range(2)] == [1, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("optimizer", [MUON, {**MUON, **NORMUON}, {"name": "adamw", "clip_norm": 1.0}])
def test_a_gpu_is_never_waited_for_in_a_step(optimizer):
    backend = make(GOLF, optimizer, device="cuda", precision="bf16", compile=False)
    take(backend, 2)
    backend.wait()
    batch = backend.host_buffer((ROWS, 2, SEQ_LEN))
    batch[:] = rows_of(3)
    plan = plan_of(backend, 3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = backend.step(batch, ROWS * SEQ_LEN, plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pending.result().loss > 0
