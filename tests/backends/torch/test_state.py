import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch_kit import SMALL, by_name, make, raw, rows_of, take, weights, written
from torch_kit import step as take_step

from ingot.backends.base import State
from ingot.backends.torch.state import LossScale, record, record_through, snapshot
from ingot.errors import CheckpointError
from ingot.runs.checkpoints import load_checkpoint, save_checkpoint
from ingot.runtime.ranks import Ranks

NO_GPU = not torch.cuda.is_available()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_state_put_back_is_the_state_bit_for_bit(name):
    one = make({**SMALL, "bias": True}, {"name": name})
    take(one, 3)
    other = make({**SMALL, "bias": True}, {"name": name}, seed=7)
    assert raw(other) != raw(one)
    other.load(by_name(one.snapshot()()))
    assert raw(other) == raw(one)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_after_a_state_was_put_back_is_the_step_without(name):
    settings = {**SMALL, "dropout": 0.1}, {"name": name}
    unbroken, resumed = make(*settings), make(*settings)
    take(unbroken, 2)
    resumed.load(by_name(unbroken.snapshot()()))
    assert take(unbroken, 2, first=2) == take(resumed, 2, first=2)
    assert raw(unbroken) == raw(resumed)


def test_steps_taken_and_undone_leave_no_trace():
    primed, plain = make({**SMALL, "dropout": 0.1}), make({**SMALL, "dropout": 0.1})
    before = by_name(primed.snapshot()())
    take(primed, 3)
    primed.load(before)
    assert take(primed, 2) == take(plain, 2)
    assert raw(primed) == raw(plain)


def scaled(good_steps=0, overflows=0):
    """A backend that scales its loss as one in fp16 does, and computes in float32: fp16 is not for a CPU."""
    backend = make(optimizer={"name": "muon"})
    backend._scale = LossScale(True, torch.device("cpu"))
    for overflow in [True] * overflows + [False] * good_steps:
        backend._scale.update(torch.tensor(overflow))
    return backend


def test_the_scale_of_an_fp16_loss_goes_through_a_checkpoint_and_grows_when_it_would_have(tmp_path):
    unbroken, resumed = scaled(good_steps=1998, overflows=3), scaled()
    take(unbroken, 1)
    resumed.load(load_checkpoint(save_checkpoint(tmp_path, 1, unbroken.snapshot()(), {})).tensors)
    for step, value in ((1, 65536 / 4), (2, 65536 / 4)):  # it was an eighth, for 1,999 good steps
        assert take(unbroken, 1, first=step) == take(resumed, 1, first=step)
        assert unbroken._scale.value.item() == resumed._scale.value.item() == value
    assert raw(unbroken) == raw(resumed)


def test_a_run_in_fp16_goes_on_in_another_precision_and_one_in_another_in_fp16():
    half, full = scaled(overflows=3), make(optimizer={"name": "muon"})
    names = {name for file, name in raw(half)}
    full.load(by_name(half.snapshot()()))
    assert names - {name for file, name in raw(full)} == {"scaler/scale", "scaler/good_steps"}
    another = scaled()
    another.load(by_name(full.snapshot()()))
    assert another._scale.value.item() == 65536


@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_tensor_through_a_small_buffer_is_the_tensor(shape, dtype):
    tensor = torch.randint(-99, 99, shape).to(dtype)
    for source in (tensor, tensor.mT if tensor.dim() == 2 else tensor):
        through, straight = record_through(torch.empty(16, dtype=torch.uint8), "t", source), record("t", source)
        assert (through.dtype, through.shape, bytes(through.data)) == (straight.dtype, straight.shape, bytes(straight.data))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(NO_GPU, reason="needs a GPU"))])
def test_a_snapshot_is_what_the_state_was_however_late_it_is_brought_to_the_host(device):
    backend = make(device=device)
    take(backend, 1)
    before, snapshot = raw(backend), backend.snapshot()
    take(backend, 2, first=1)
    found: list[State] = []
    saver = threading.Thread(target=lambda: found.append(snapshot()))
    saver.start()
    take(backend, 2, first=3)
    saver.join()
    take(backend, 1, first=5)  # nor does training touch what has been brought
    later = {(file, r.name): (r.dtype, r.shape, bytes(r.data)) for file, records in found[0].items() for r in records}
    assert later == before != raw(backend)


@pytest.fixture
def fake_gpu(monkeypatch):
    """What `snapshot` asks of CUDA, on a card with room for copies."""
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 1 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 2 << 30))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(wait_event=lambda event: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *given, pin_memory=False, **named: empty(*given, **named))
    return SimpleNamespace(type="cuda")


def test_copies_on_the_gpu_are_given_up_when_the_host_has_them(fake_gpu, monkeypatch):
    clone, copies = torch.Tensor.clone, []

    def noted(tensor):
        copies.append(weakref.ref(copy := clone(tensor)))
        return copy

    monkeypatch.setattr(torch.Tensor, "clone", noted)
    bring = snapshot({"model": [("a", torch.ones(3)), ("b", torch.zeros(2))]}, fake_gpu)
    assert all(copy() is not None for copy in copies) and len(copies) == 2
    found = bring()  # which the thread that writes holds on to until the disk has it all
    assert [record.name for record in found["model"]] == ["a", "b"]
    assert not any(copy() is not None for copy in copies)


def test_loading_checks_every_tensor():
    state = by_name(make().snapshot()())
    for change, message in (
        (lambda model: model.pop("transformer.ln_f.weight"), r"has no tensor transformer\.ln_f\.weight"),
        (lambda model: model.update(more=record("more", torch.zeros(1))), r"has a tensor more that the model does not"),
        (
            lambda model: model.update({"transformer.ln_f.weight": record("", torch.zeros(3))}),
            r"transformer\.ln_f\.weight has shape \[3\], but \[32\] in the model",
        ),
    ):
        model = dict(state["model"])
        change(model)
        with pytest.raises(CheckpointError, match=message):
            make().load({"model": model, "optimizer": state["optimizer"]})


def first_loss(backend, step=0):
    return take_step(backend, rows_of(0), step).loss


def test_dropout_depends_on_seed_step_and_rank():
    dropping = {**SMALL, "dropout": 0.3}
    base = make(dropping)
    state = by_name(base.snapshot()())
    losses = {"base": first_loss(base)}
    for name, other, step in (
        ("again", make(dropping), 0),
        ("another step", make(dropping), 1),
        ("another seed", make(dropping, seed=7), 0),
        ("another rank", make(dropping, ranks=Ranks(rank=1, world_size=1)), 0),
    ):
        other.load(state)
        losses[name] = first_loss(other, step)
    assert losses["again"] == losses["base"]
    assert len(set(losses.values())) == 4


def test_dropout_depends_on_nothing_that_happened_before():
    plain, busy = make({**SMALL, "dropout": 0.3}), make({**SMALL, "dropout": 0.3})
    rows = rows_of(0)
    busy.score(rows)
    written(busy, [1, 2], 5, temperature=1.0, seed=3)
    torch.rand(100)
    assert take(busy, 1) == take(plain, 1)
    assert raw(busy) == raw(plain)


def test_initial_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    one = weights(make())
    torch.manual_seed(2)
    same, other = weights(make(micro_batch=2)), weights(make(seed=7))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["transformer.wte.weight"], other["transformer.wte.weight"])
