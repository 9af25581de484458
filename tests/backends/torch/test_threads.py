"""The threads of a CPU: as asked for, as the run had them, or as are fastest; afterwards the program has its own again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch_kit import make, plan_of, rows_of

from ingot.backends.torch import tune as threads
from ingot.backends.torch import tune as tuning
from ingot.backends.torch.tune import THREADS_VARIABLE, settle_threads

NOW = [0.0]  # seconds, which pass in the passes that are measured alone


@pytest.fixture(autouse=True)
def torch_has_four(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    monkeypatch.delenv(THREADS_VARIABLE, raising=False)
    monkeypatch.setattr(threads, "cpu_count", lambda: 4)
    monkeypatch.setattr(tuning, "time", SimpleNamespace(perf_counter=lambda: NOW[0]))
    yield
    torch.set_num_threads(before)


def alone(values: Sequence[float]) -> list[float]:
    return list(values)


def passes(seconds: Callable[[int], float]) -> Callable[[], None]:
    """A pass that takes so long with the threads it finds."""

    def attempt() -> None:
        NOW[0] += seconds(torch.get_num_threads())

    return attempt


def never() -> None:
    raise AssertionError("nothing is measured here")


def test_threads_that_wait_for_each_other_become_fewer() -> None:
    assert settle_threads("auto", {}, True, passes(lambda count: 0.01 * count), alone) == 1


def test_threads_that_share_the_work_stay() -> None:
    assert settle_threads("auto", {}, True, passes(lambda count: 0.04 / count), alone) == 4


def test_fewer_threads_that_are_hardly_faster_are_not_worth_other_bits() -> None:
    assert settle_threads("auto", {}, True, passes(lambda count: 0.02), alone) == 4


def test_the_slowest_rank_decides() -> None:
    with_another = iter([[4.0], [0.1], [0.5]])  # what both have at most: threads, then seconds with four and with two
    assert settle_threads("auto", {}, True, passes(lambda count: 0.001 * count), lambda values: next(with_another)) == 4


@pytest.mark.parametrize(
    ("asked", "kept", "found"),
    [
        (3, {"threads": 2}, 3),
        ("auto", {"threads": 2}, 2),
        ("auto", {"device": "cpu, 4 threads", "micro_batch": 2}, 4),  # of a version that did not say
    ],
    ids=["asked-for", "as-the-run-had-them", "as-an-older-run-had-them"],
)
def test_what_is_known_is_not_measured(asked, kept, found) -> None:
    assert settle_threads(asked, kept, True, never, alone) == found == torch.get_num_threads()


def test_more_threads_than_this_machine_has_are_measured_anew() -> None:
    assert settle_threads("auto", {"threads": 64}, True, passes(lambda count: 0.01 * count), alone) == 1


def test_the_variable_of_openmp_and_deterministic_mode_leave_torchs_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settle_threads("auto", {}, False, never, alone) == 4
    monkeypatch.setenv(THREADS_VARIABLE, "4")
    assert settle_threads("auto", {}, True, never, alone) == 4


def test_the_number_is_told_and_kept_and_the_program_has_its_own_again() -> None:
    backend = make(threads=2)
    assert backend.device.name == "cpu, 2 threads" and backend.tuned()["threads"] == 2
    kept = backend.tuned()
    backend.close()
    assert torch.get_num_threads() == 4
    again = make(threads=4)
    training = again._config.training.model_copy(update={"threads": "auto"})
    again._config = again._config.model_copy(update={"training": training})
    again.tune([(plan_of(again), rows_of(0))], kept)
    assert again.device.name == "cpu, 2 threads"
    again.close()
    assert torch.get_num_threads() == 4
