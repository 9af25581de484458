"""Documents of a batch: where they begin in all its tokens, and that training by that is training by their numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch_kit import ROWS, SEQ_LEN, VOCABULARY, make, rows_of, step, weights

from ingot.backends.torch import tune as attention
from ingot.backends.torch.inference import STARTS_MULTIPLE, document_starts
from ingot.backends.torch.tune import Tuned


def numbered(rows, length, chance, seed=1):
    """Document numbers of rows in which a document begins with this chance at every token but a row's first."""
    begins = np.random.default_rng(seed).random((rows, length)) < chance
    begins[:, 0] = False
    return np.cumsum(begins, axis=1).astype(np.int32)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 700), st.floats(0, 1), st.integers(0, 9))
def test_tokens_between_two_boundaries_are_a_document(rows, length, chance, seed):
    numbers = numbered(rows, length, chance, seed)
    starts = document_starts(numbers)
    count = sum(len(np.unique(row)) for row in numbers)
    assert starts.dtype == np.int32 and count < len(starts) <= count + STARTS_MULTIPLE and len(starts) % STARTS_MULTIPLE == 0
    assert starts[0] == 0 and np.all(np.diff(starts[: count + 1]) > 0) and np.all(starts[count:] == numbers.size)
    document = np.searchsorted(starts, np.arange(numbers.size), side="right").reshape(rows, length)
    for row, found in zip(numbers, document, strict=True):
        assert np.array_equal(np.diff(row), np.diff(found))
    assert len(np.unique(document)) == count, "no document goes on in another row"


@pytest.mark.parametrize("family", ["gpt2", "llama", "golf", "frontier"])
def test_one_graph_is_for_any_number_of_documents(family):
    fewer = {} if family == "gpt2" else {"kv_heads": 1}
    backend = make({"family": family, "layers": 2, "heads": 2, "width": 32, **fewer})
    counter = CompileCounterWithBackend("aot_eager")
    graph = torch.compile(backend.model, dynamic=False, backend=counter)
    sizes = set()
    for chance in (0.0, 0.1, 1.0):
        batch = batch_of(numbered(60, SEQ_LEN, chance), rows_of(3)[np.zeros(60, int)])
        with backend._computing("flash4"):
            *inputs, documents = backend._upload(batch)
            found = graph(*inputs, documents)
            found.backward()
        with backend._computing("default"):
            assert found.item() == pytest.approx(backend.model(*backend._upload(batch)).item(), abs=1e-4)
        sizes.add(len(documents))
    assert len(sizes) == 3 and counter.frame_count == 1


def batch_of(documents, rows=None):
    rows = rows_of(3) if rows is None else rows
    return np.concatenate([rows, np.array(documents, np.int32).reshape(-1, 1, SEQ_LEN)], axis=1)


FEW, MANY = np.zeros((ROWS, SEQ_LEN)), np.tile(np.arange(SEQ_LEN) // 5, (ROWS, 1))


@pytest.mark.parametrize(("attention", "dimensions"), [("flash4", 1), ("default", 2)])
def test_only_flash_attention_is_given_boundaries(attention, dimensions):
    backend = make()
    with backend._computing(attention):
        *_, documents = backend._upload(batch_of(FEW))
    assert documents.dim() == dimensions


@pytest.mark.parametrize("model", [{"family": "golf", "kv_heads": 1}, {"family": "frontier", "window": 4, "layers": 4}])
def test_a_step_and_a_score_are_the_same_by_boundaries(model):
    settings, found = {"layers": 2, "heads": 2, "width": 32, **model}, []
    for name in ("default", "flash4"):
        backend = make(settings, optimizer={"epsilon": 1e-4}, micro_batch=3)
        backend._stages, backend._attention = [Tuned(3, name)], name
        losses = [step(backend, batch_of(MANY), number).loss for number in range(2)]
        found.append(([*losses, backend.score(batch_of(MANY))], weights(backend)))
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-4)
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-5, rtol=1e-4)


def test_flash_attention_is_tried_for_documents_of_our_models_where_it_is_installed(monkeypatch):
    backend, tried = make(), []
    monkeypatch.setattr(backend, "_try", lambda batch, times, name: tried.append(name))
    assert backend._fastest_attention(batch_of(MANY)) == "default" and not tried
    monkeypatch.setattr(attention, "has_flash4", lambda: True)
    assert backend._fastest_attention(batch_of(MANY)) in ("default", "flash4")
    assert tried == ["default", "flash4"] * 3
    assert attention.candidates(torch.nn.Linear(2, VOCABULARY), False, True, list) == []
