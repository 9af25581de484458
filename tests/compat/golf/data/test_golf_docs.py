import json

import pytest
from golf_kit import THREE, Folder, Repository, forget_user, lines, sidecar
from hub_server import serving

from ingot.errors import DataError


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    forget_user(monkeypatch, tmp_path)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "out")


@pytest.fixture
def repository(tmp_path):
    with serving() as server:
        yield Repository(server, tmp_path)


DOCS = lines(THREE)


def test_documents_and_what_lies_beside_them_come_from_the_hub(repository):
    beside = sidecar(DOCS, docs_val=2, shuffle_seed=1337)
    repository.commit(DOCS, beside)
    result = repository(val_documents=None)
    assert (repository.out / "docs_selected.jsonl").read_bytes() == DOCS
    manifest = result.manifest
    assert (manifest["num_docs"], manifest["num_val_docs"], manifest["shuffle_seed"]) == (3, 2, 1337)
    assert manifest["docs_meta"]["source_manifest"] == "docs_selected.source_manifest.json"
    assert manifest["docs_meta"]["source_sidecar"] == json.loads(beside)
    repository.server.requests.clear()
    assert repository(val_documents=None).kept == ["fineweb10B_byte260"]
    assert not [request for request in repository.server.requests if request.path.endswith(".jsonl")]


def test_documents_whose_hash_is_not_the_one_beside_them_are_refused(repository):
    repository.commit(DOCS, sidecar(lines(["other"])))
    with pytest.raises(
        DataError, match=r"docs_selected.jsonl has the sha256 [0-9a-f]{12}, but docs_selected.source_manifest.json"
    ):
        repository()
    assert not (repository.out / "datasets").exists()


def test_a_sidecar_that_counts_wrong_is_refused_and_nothing_is_published(repository):
    beside = json.dumps({**json.loads(sidecar(DOCS)), "num_docs": 4}).encode()
    repository.commit(DOCS, beside)
    with pytest.raises(DataError, match="holds 3 documents instead of 4"):
        repository()
    assert not (repository.out / "datasets").exists()


def test_documents_without_text_are_refused_without_an_option_that_the_script_has_not(repository):
    repository.commit(b'{"content": "a"}\n')
    with pytest.raises(DataError, match=r"docs_selected.jsonl:1 is not a JSON object with a string in its field 'text'$"):
        repository(val_documents=0)


def test_a_repository_without_documents_is_named_with_the_path(repository):
    repository.commit()
    with pytest.raises(DataError, match=r"repository owner/golf has no datasets/docs_selected.jsonl"):
        repository()


def test_without_a_sidecar_lines_are_counted_and_a_stale_one_is_removed(repository):
    repository.commit(DOCS, sidecar(DOCS))
    repository()
    docs = lines(["one", "two"]) + b"\n  \n"
    (repository.out / "docs_selected.jsonl").unlink()
    repository.commit(docs)
    result = repository()
    assert result.manifest["num_docs"] == 2
    assert not (repository.out / "docs_selected.source_manifest.json").exists()


def test_documents_of_another_origin_are_never_replaced(repository):
    repository.commit(DOCS)
    repository.out.docs(["mine"])
    mine = (repository.out / "docs_selected.jsonl").read_bytes()
    with pytest.raises(DataError, match=r"differs from the file in owner/golf .* set HF_HUB_OFFLINE=1 to use it"):
        repository()
    assert (repository.out / "docs_selected.jsonl").read_bytes() == mine


@pytest.mark.parametrize(("docs", "said"), [(b"", "holds no documents"), (b"\n \n", "holds no documents")])
def test_no_documents_are_an_error(folder, docs, said):
    (folder / "docs_selected.jsonl").write_bytes(docs)
    with pytest.raises(DataError, match=said):
        folder(val_documents=0)
