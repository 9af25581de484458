import json
from functools import cache

import numpy as np
import pytest
from golf_kit import REPO, TEXTS, THREE, Folder, Repository, byte_ids, forget_user, lines, sidecar
from hub_server import serving
from shard_files import write_shard

from ingot.data.tokenizers import GPT2Tokenizer
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
        DataError, match=r"docs_selected.jsonl has the sha256 [0-9a-f]{12} and docs_selected.source_manifest.json"
    ):
        repository()
    assert not (repository.out / "datasets").exists()


def test_a_sidecar_that_counts_wrong_is_refused_and_nothing_is_published(repository):
    beside = json.dumps({**json.loads(sidecar(DOCS)), "num_docs": 4}).encode()
    repository.commit(DOCS, beside)
    with pytest.raises(DataError, match="holds 3 documents instead of 4"):
        repository()
    assert not (repository.out / "datasets").exists()


@pytest.mark.parametrize(("key", "value"), [("num_docs", "3"), ("num_docs", -1), ("docs_val", True)])
def test_a_sidecar_whose_numbers_are_none_is_refused(repository, key, value):
    repository.commit(DOCS, json.dumps({**json.loads(sidecar(DOCS)), key: value}).encode())
    with pytest.raises(DataError, match=f"says {key}={value!r}, which is not a number of documents"):
        repository(val_documents=None)


def test_documents_without_text_are_refused_without_an_option_that_the_script_has_not(repository):
    repository.commit(b'{"content": "a"}\n')
    with pytest.raises(DataError, match=r"no field 'text'; fields found: 'content'$"):
        repository(val_documents=0)


def offline(repository):
    hub = repository.hub()
    hub.offline = True
    return hub


def test_offline_the_repository_is_named_only_if_the_text_is_known_to_be_its_own(repository):
    repository.commit(DOCS, sidecar(DOCS))
    repository()
    assert repository.out(hub=offline(repository)).manifest["docs_meta"]["remote_repo_id"] == REPO
    (repository.out / "docs_selected.jsonl").write_bytes(lines(["my own"]))
    (repository.out / "docs_selected.source_manifest.json").unlink()
    assert repository.out(hub=offline(repository)).manifest["docs_meta"]["remote_repo_id"] is None


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
    with pytest.raises(DataError, match=r"is not that of owner/golf .* set HF_HUB_OFFLINE=1 to use it"):
        repository()
    assert (repository.out / "docs_selected.jsonl").read_bytes() == mine


def test_without_the_hub_the_way_to_use_what_is_here_is_told(repository):
    repository.commit(DOCS)
    repository()
    repository.server.fail("owner/golf", status=400, times=9)
    with pytest.raises(DataError, match=r"HF_HUB_OFFLINE=1 uses .*docs_selected.jsonl as it is"):
        repository()


@pytest.mark.parametrize(("docs", "said"), [(b"", "holds no documents"), (b"\n \n", "holds no documents")])
def test_no_documents_are_an_error(folder, docs, said):
    (folder / "docs_selected.jsonl").write_bytes(docs)
    with pytest.raises(DataError, match=said):
        folder(val_documents=0)


# Documents out of GPT-2 tokens


@cache
def gpt2():
    return GPT2Tokenizer()


def gpt2_shards(folder, splits, limit=40):
    folder.mkdir(parents=True)
    for split, texts in splits.items():
        stream = np.concatenate([gpt2().encode_document(text) for text in texts])
        for number, start in enumerate(range(0, len(stream), limit)):
            write_shard(folder / f"fineweb_{split}_{number:06d}.bin", stream[start : start + limit])
    return folder


@pytest.fixture
def shards(tmp_path):
    return gpt2_shards(tmp_path / "tokens", {"train": [*TEXTS[:9], ""], "val": ["é\u2014first", "second"]})


@pytest.mark.parametrize("batch", [None, 1, 3])
def test_gpt2_shards_become_documents_with_validation_first(tmp_path, shards, batch):
    out = Folder(tmp_path / "out")
    (out / "docs_selected.jsonl").unlink()
    result = out(val_documents=None, gpt2_shards=shards, decode_batch=batch)
    found = [json.loads(line)["text"] for line in (out / "docs_selected.jsonl").read_text().splitlines()]
    assert found == ["é\u2014first", "second", *TEXTS[:9], ""]
    assert (result.manifest["num_docs"], result.manifest["num_val_docs"]) == (12, 2)
    assert result.manifest["docs_meta"]["remote_repo_id"] is None
    assert out.stream("fineweb10B_byte260", "val") == byte_ids("é\u2014first") + byte_ids("second")
    assert result.warnings == []
    assert out(val_documents=None, gpt2_shards=shards).kept == ["fineweb10B_byte260"]


def test_documents_made_of_other_tokens_are_not_taken_for_these(folder, shards):
    with pytest.raises(DataError, match="exists and was not made of the tokens in"):
        folder(gpt2_shards=shards)


def test_decoding_loses_nothing(tmp_path, shards):
    out = Folder(tmp_path / "out")
    (out / "docs_selected.jsonl").unlink()
    out({"kind": "gpt2"}, val_documents=None, chunk_tokens=40, gpt2_shards=shards)
    for path in shards.iterdir():
        assert (out / f"datasets/fineweb10B_gpt2/{path.name}").read_bytes() == path.read_bytes()


def test_tokens_that_are_not_gpt2s_are_refused(tmp_path):
    out = Folder(tmp_path / "out")
    (out / "docs_selected.jsonl").unlink()
    (tmp_path / "small").mkdir()
    write_shard(tmp_path / "small/fineweb_train_000000.bin", np.array([1, 5, 9, 1, 7]))
    with pytest.raises(DataError, match=r"no document of .*small begins with GPT-2's mark 50256"):
        out(gpt2_shards=tmp_path / "small")
    (tmp_path / "large").mkdir()
    write_shard(tmp_path / "large/fineweb_train_000000.bin", np.array([50256, 60_000]))
    with pytest.raises(DataError, match="holds token 60,000, which GPT-2 does not have"):
        out(gpt2_shards=tmp_path / "large")
    (tmp_path / "bytes").mkdir()
    other = Folder(tmp_path / "other")
    other()
    with pytest.raises(DataError, match="tokens of a byte tokenizer"):
        out(gpt2_shards=other / "datasets/fineweb10B_byte260")
    assert {path.name for path in out.path.iterdir()} == {".download.lock"}


def test_a_document_cut_inside_a_character_is_told_of(tmp_path):
    ids = gpt2().encode_document("caf\U0001f600")[:-1]
    (tmp_path / "tokens").mkdir()
    write_shard(tmp_path / "tokens/fineweb_train_000000.bin", ids)
    out = Folder(tmp_path / "out")
    (out / "docs_selected.jsonl").unlink()
    result = out(val_documents=0, gpt2_shards=tmp_path / "tokens")
    assert "1 documents of" in result.warnings[0] and "U+FFFD" in result.warnings[0]


def test_gpt2_shards_of_the_output_stand_in_for_a_repository_without_documents(repository, tmp_path):
    repository.commit()
    gpt2_shards(repository.out / "datasets/fineweb10B_gpt2", {"train": TEXTS[:3]})
    with pytest.raises(DataError, match=r"has no datasets/docs_selected.jsonl"):
        repository()
    assert repository(decode_batch=7).manifest["num_docs"] == 3
