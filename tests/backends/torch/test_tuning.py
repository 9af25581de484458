"""What is tried out before a run; the trials themselves stand for a GPU's."""

import pytest
import torch

from ingot.backends.torch import tune as tuning
from ingot.backends.torch.state import LossScale, record
from ingot.backends.torch.tune import ATTENTION, fastest_attention, largest_micro_batch, smallest_micro_batch
from ingot.errors import ConfigError


@pytest.mark.parametrize(("rows", "room", "found"), [(12, 12, 12), (12, 5, 3), (13, 6, 4), (7, 1, 1)])
def test_the_micro_batch_is_halved_until_it_fits(rows, room, found):
    tried = []

    def attempt(size):
        tried.append(size)
        if size > room:
            raise torch.OutOfMemoryError

    assert largest_micro_batch(rows, attempt, list) == found == tried[-1]
    assert tried[0] == rows


def test_a_rank_with_room_halves_when_another_has_none():
    others = iter([[1.0], [1.0], [0.0]])  # what another rank says of 12, 6 and 3 rows
    tried = []
    assert largest_micro_batch(12, tried.append, lambda mine: next(others)) == 3
    assert tried == [12, 6, 3]


def test_a_row_that_does_not_fit_is_told_with_what_helps():
    def attempt(size):
        raise torch.OutOfMemoryError

    with pytest.raises(ConfigError, match=r"lower data\.seq_len, shrink the model or set training\.gradient_checkpointing=true"):
        largest_micro_batch(4, attempt, list)


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only in the trials."""
    now = [0.0]
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("largest", "per_pass", "found", "tried"),
    [
        (96, 0.014, 48, [96, 48, 24]),  # seconds that a pass takes beside one per row: 96 rows are cut once
        (96, 0.0, 3, [96, 48, 24, 12, 6, 3]),  # equal rows: down to what cannot be halved
        (96, 2.0, 96, [96, 48]),
        (64, -0.5, 1, [64, 32, 16, 8, 4, 2, 1]),  # small ones faster
        (7, 0.0, 7, [7]),
    ],
)
def test_a_gpu_takes_the_smallest_micro_batch_that_is_hardly_slower(clock, largest, per_pass, found, tried):
    sizes, computed = [], []

    def attempt(size, times):
        sizes.append(size)
        computed.append(size * times)
        clock[0] += times * (size + per_pass * largest)

    assert smallest_micro_batch(largest, attempt, list) == found
    assert list(dict.fromkeys(sizes)) == tried
    assert sum(computed) <= largest * (1 + 1.5 * len(tried))  # what it costs: less than this many rows


def test_the_first_pass_of_a_smaller_micro_batch_is_not_timed(clock):
    cold = {8: 50.0, 4: 50.0}

    def attempt(size, times):
        clock[0] += times * size + cold.pop(size, 0.0)

    assert smallest_micro_batch(16, attempt, list) == 1


def test_a_trial_that_finds_no_room_is_left_out(clock):
    def attempt(size, times):
        if size == 16:
            raise torch.OutOfMemoryError
        clock[0] += times * (size + 1)

    assert smallest_micro_batch(16, attempt, list) == 8


def test_the_slowest_rank_decides_how_small_a_micro_batch_is(clock):
    def attempt(size, times):
        clock[0] += times * size

    def maximum(values):
        return [max(value, 2.0 * 8) for value in values]  # half of the rows take another rank as long as all of them

    assert smallest_micro_batch(16, attempt, maximum) == 16


@pytest.mark.parametrize("error", [RuntimeError("No available kernel"), AssertionError("as a package's kernel says it")])
def test_the_fastest_kernel_is_taken_and_one_that_cannot_is_no_candidate(clock, error):
    seconds = {"cudnn": 2.0, "flash": 1.0}

    def attempt(name, times):
        if name not in seconds:
            raise error
        clock[0] += times * seconds[name]

    assert fastest_attention(list(ATTENTION), attempt, deterministic=False, maximum=list) == "flash"
    assert fastest_attention(list(ATTENTION), attempt, deterministic=True, maximum=list) == "cudnn"


def test_the_first_trial_of_a_kernel_is_not_timed(clock):
    cold = dict(zip(ATTENTION, (50.0, 0.0, 0.0), strict=True))

    def attempt(name, times):
        clock[0] += cold.pop(name, 0.0) + times * {"cudnn": 1.0}.get(name, 2.0)

    assert fastest_attention(list(ATTENTION), attempt, deterministic=False, maximum=list) == "cudnn"


def test_what_a_gpu_takes_after_it_has_waited_is_not_what_a_kernel_takes(clock):
    waited = [False]

    def attempt(name, times):
        clock[0] += times * {"cudnn": 2.0}.get(name, 3.0) * (2 if waited[0] and times > 1 else 1)
        waited[0] = name == list(ATTENTION)[-1] and times == 1  # compiled for seconds, after which cuDNN is timed first

    assert fastest_attention(list(ATTENTION), attempt, deterministic=False, maximum=list) == "cudnn"


def test_where_no_kernel_can_the_choice_is_torchs():
    def attempt(name, times):
        raise RuntimeError("No available kernel")

    assert fastest_attention(list(ATTENTION), attempt, deterministic=False, maximum=list) == "default"


def test_a_loss_scale_halves_where_a_gradient_overflows_and_is_kept_with_the_optimizer():
    scale, other = (LossScale(True, torch.device("cpu")) for _ in range(2))
    scale.update(torch.tensor(True))
    grads = [torch.full((2,), 32768.0)]
    scale.unscale(grads)
    assert (scale.value.item(), grads[0].tolist()) == (32768.0, [1.0, 1.0])
    memory = {name: record(name, value) for name, value in scale.tensors()}
    other.restore(memory)
    assert other.value.item() == 32768.0 and memory == {}


def test_other_precisions_have_a_scale_of_one_and_keep_nothing():
    scale = LossScale(False, torch.device("cpu"))
    scale.update(torch.tensor(True))
    assert scale.value.item() == 1.0 and scale.tensors() == []
