import hashlib
import io
import json
import os
import signal
import subprocess
import sys
from itertools import chain

import pytest
from golf_kit import BYTE, REPO, ROOT, TEXTS, Folder, Repository, byte_ids, forget_user, lines, sidecar
from hub_server import serving
from hypothesis import given
from hypothesis import strategies as st
from toy_tokenizers import sentencepiece_file, shared

from ingot.compat.golf import export_shards as golf_data
from ingot.compat.golf.download import plan_files
from ingot.compat.golf.export_shards import Export, download_hf_docs_and_tokenize, load_specs, vocabulary_lines
from ingot.data.hub import Hub
from ingot.data.prepare.blocks import EveryText, encode_block, text_blocks
from ingot.data.store.dataset import Dataset
from ingot.data.store.shards import open_shard
from ingot.data.tokenizers import ByteTokenizer, SentencePieceTokenizer, open_tokenizer
from ingot.data.verify.audit import audit
from ingot.errors import ConfigError, DataError


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


# Shards


def test_splits_share_no_file_and_every_document_begins_with_its_mark(folder):
    result = folder(chunk_tokens=5)
    assert folder.split("fineweb10B_byte260", "val") == [byte_ids("é1")]
    train = folder.split("fineweb10B_byte260", "train")
    assert list(chain.from_iterable(train)) == byte_ids("") + byte_ids("two words here")
    assert [len(shard) for shard in train] == [5, 5, 5, 1]
    stats = result.manifest["datasets"][0]["stats"]
    assert stats == {
        "docs_total": 3, "docs_val": 1, "docs_train": 2, "files_total": 5, "files_val": 1, "files_train": 4,
        "tokens_total": 20, "tokens_val": 4, "tokens_train": 16,
    }  # fmt: skip


def test_a_byte_is_its_value_behind_four_special_ids(folder):
    folder()
    assert folder.split("fineweb10B_byte260", "val")[0][1:3] == [0xC3 + 4, 0xA9 + 4]
    assert json.loads((folder / "tokenizers/fineweb_pure_byte_260.json").read_text()) == {
        "tokenizer_type": "pure_byte",
        "config": {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "byte_offset": 4, "byte_count": 256},
        "vocab_size": 260,
    }


def test_half_a_surrogate_pair_becomes_a_question_mark_and_a_whole_one_stays(folder):
    (folder / "docs_selected.jsonl").write_bytes(b'{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n')
    folder(val_documents=1)
    assert folder.stream("fineweb10B_byte260", "val") == byte_ids("a?b")
    assert folder.stream("fineweb10B_byte260", "train") == byte_ids("\U0001f600")


@given(st.lists(st.sampled_from(["", "a", "bc"]), min_size=1, max_size=9), st.integers(1, 4))
def test_documents_without_text_keep_their_place(texts, batch):
    found = []
    for block in text_blocks(texts, documents=batch):
        assert 1 <= len(block) <= batch
        whole = encode_block(ByteTokenizer(), EveryText(block))
        assert (whole.tokens.sum(), whole.empty) == (len(whole.ids), 0)
        assert whole.bytes.tolist() == whole.piece_bytes.tolist() == [len(text) for text in block]
        found += whole.ids.tolist()
    assert found == list(chain.from_iterable(map(byte_ids, texts)))


def test_what_is_written_depends_neither_on_workers_nor_on_batches(tmp_path, monkeypatch):
    contents = []
    for number, (workers, batch) in enumerate([(1, 1024), (1, 1), (2, 7)]):
        monkeypatch.setattr(golf_data, "BATCH", batch)
        folder = Folder(tmp_path / str(number), [*TEXTS, "", "end"])
        folder(workers=workers, val_documents=9, chunk_tokens=100)
        content = folder.content()
        del content["dataset.json"]  # which names the input
        contents.append(content)
    assert contents[0] == contents[1] == contents[2]


def test_the_folder_is_a_dataset_of_ours_too(folder):
    folder.docs(TEXTS)
    folder(BYTE, {"vocab_size": 290}, val_documents=7, chunk_tokens=50)
    for name in ("fineweb10B_byte260", "fineweb10B_sp290"):
        dataset = Dataset.open(folder / f"datasets/{name}")
        assert {one.code for one in audit(dataset.folder).findings} <= {"overlap-documents", "overlap-ngrams"}  # TEXTS repeat
        assert [dataset.split(split).bytes for split in ("val", "train")] == [
            sum(map(len, TEXTS[:7])),
            sum(map(len, TEXTS[7:])),
        ]
        assert dataset.split("val").documents == 7
        starts = dataset.split("train").document_starts()
        assert (
            dataset.split("train").read(int(starts[3]), int(starts[4])).tolist()
            == dataset.tokenizer.encode_document(TEXTS[10]).tolist()
        )


@pytest.mark.parametrize(("held_out", "files"), [(0, (0, 1)), (3, (1, 0))])
def test_all_or_none_of_the_documents_may_be_validation(folder, held_out, files):
    stats = folder(val_documents=held_out, chunk_tokens=100).manifest["datasets"][0]["stats"]
    assert (stats["files_val"], stats["files_train"]) == files


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"val_documents": 4}, "validation needs 4 documents, but .* has 3"),
        ({"val_documents": None}, "validation needs 50,000 documents"),
        ({"val_documents": -1}, "validation needs -1 documents"),
        ({"chunk_tokens": 0}, "--chunk-tokens 0 is out of range"),
        ({"chunk_tokens": 2**31}, "out of range"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(folder, request_, said):
    with pytest.raises(ConfigError, match=said):
        folder(**request_)
    assert not (folder / "manifest.json").exists()


@pytest.mark.parametrize("line", [b"{", b'{"body": "x"}', b'{"text": 7}', b"[]", b"\xff"])
def test_a_line_that_is_no_document_ends_the_export_with_its_number(folder, line):
    with (folder / "docs_selected.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(DataError, match=r"docs_selected.jsonl:4"):
        folder()
    assert not (folder / "datasets").exists()


# Old data, killed exports


def test_old_shards_stay_until_the_new_ones_are_complete(folder):
    folder()
    before = folder.content()
    folder.docs(["new", "text"])
    with (folder / "docs_selected.jsonl").open("ab") as file:
        file.write(b"{\n")
    with pytest.raises(DataError):
        folder()
    assert folder.content() == before
    folder.docs(["new", "text"])
    folder()
    assert folder.stream("fineweb10B_byte260", "train") == byte_ids("text")
    assert folder.stream("fineweb10B_byte260", "val") == byte_ids("new")
    assert set(folder.content()) == {
        "fineweb_train_000000.bin", "fineweb_val_000000.bin", "fineweb_train.index", "fineweb_val.index", "dataset.json",
    }  # fmt: skip
    assert [path.name for path in (folder / "datasets").iterdir()] == ["fineweb10B_byte260"]


def test_a_data_set_that_is_complete_is_kept_and_one_of_other_settings_is_not(folder):
    folder()
    before = (folder / "datasets/fineweb10B_byte260").stat().st_ino
    assert folder().kept == ["fineweb10B_byte260"]
    assert (folder / "datasets/fineweb10B_byte260").stat().st_ino == before
    assert folder(val_documents=2).kept == []
    (folder / "datasets/fineweb10B_byte260/fineweb_train_000000.bin").write_bytes(b"short")
    assert folder(val_documents=2).kept == []
    assert audit(folder / "datasets/fineweb10B_byte260").ok


KILLED = """
import os, signal, sys
from pathlib import Path
from ingot.data.prepare import pipeline
from ingot.data.hub import Hub
from ingot.compat.golf import export_shards
from ingot.compat.golf.export_shards import Export, load_specs

pipeline.SAVE_TOKENS = 200
export_shards.REPORT_DOCUMENTS = 40
export_shards.BATCH = 4
hub = Hub("owner/golf")
hub.offline = True

def notify(line):
    print(line, flush=True)
    if "of 60 documents" in line and sys.argv[3] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)

Export(Path(sys.argv[1]), load_specs(Path(sys.argv[2])), hub, "", 9, 100, workers=1, notify=notify).run()
"""


def test_a_killed_export_publishes_nothing_and_the_same_command_goes_on_to_the_same_bytes(folder, tmp_path, python):
    folder.docs(TEXTS)
    folder.specs(BYTE)
    specs = tmp_path / "specs.json"
    assert python(KILLED, folder.path, specs, "kill").wait(300) == -signal.SIGKILL
    assert not (folder / "manifest.json").exists()
    assert not (folder / "datasets/fineweb10B_byte260").exists()
    again = python(KILLED, folder.path, specs, "go on")
    said, problem = again.communicate(timeout=300)
    assert (again.returncode, problem) == (0, "")
    assert "resuming after document 36" in said
    other = Folder(tmp_path / "other", TEXTS)
    other(val_documents=9, chunk_tokens=100)
    done, expected = folder.content(), other.content()
    assert done.pop("dataset.json") and expected.pop("dataset.json")
    assert done == expected
    assert [path.name for path in (folder / "datasets").iterdir()] == ["fineweb10B_byte260"]


def test_downloaded_shards_are_not_replaced_without_a_word(folder):
    folder()
    assert not folder.said("replaced")
    (folder / "datasets/fineweb10B_byte260/dataset.json").unlink()
    folder()
    assert folder.said("holds different shards, which are replaced")


def test_a_file_where_the_folder_belongs_is_not_touched(folder):
    (folder / "datasets").mkdir()
    (folder / "datasets/fineweb10B_byte260").write_text("mine")
    with pytest.raises(ConfigError, match="is a file"):
        folder()
    assert (folder / "datasets/fineweb10B_byte260").read_text() == "mine"


def test_a_folder_that_is_a_link_to_another_disk_stays_one(folder, tmp_path):
    (tmp_path / "disk/real").mkdir(parents=True)
    (folder / "datasets").mkdir()
    (folder / "datasets/fineweb10B_byte260").symlink_to(tmp_path / "disk/real")
    folder()
    folder(val_documents=2)
    assert (folder / "datasets/fineweb10B_byte260").is_symlink()
    assert (tmp_path / "disk/real/dataset.json").is_file()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["real"]


# The manifest


def test_the_manifest_has_golfs_schema_with_paths_below_the_output(folder):
    folder.docs(TEXTS)
    model = folder / "mine.model"
    model.write_bytes(sentencepiece_file())
    size = SentencePieceTokenizer(model.read_bytes()).vocab_size
    folder(BYTE, {"vocab_size": size}, reuse=[f"{size}={model}"])
    manifest = folder.manifest()
    assert list(manifest) == [
        "version", "num_docs", "num_val_docs", "shuffle_seed", "shard_size", "append_eos", "docs_jsonl", "docs_meta",
        "tokenizer_specs", "tokenizers", "datasets",
    ]  # fmt: skip
    assert (manifest["version"], manifest["num_docs"], manifest["num_val_docs"], manifest["shard_size"]) == ("10B", 60, 1, 500)
    assert manifest["docs_meta"] == {
        "remote_repo_id": None,
        "remote_root": None,
        "num_docs": 60,
        "docs_sha256": hashlib.sha256((folder / "docs_selected.jsonl").read_bytes()).hexdigest(),
        "source_manifest": None,
    }
    assert manifest["tokenizers"][0] == {
        "name": "b", "kind": "byte", "vocab_size": 260, "bos_id": 1, "eos_id": 2, "recommended_bigram_vocab_size": 1920,
        "source_spec": BYTE, "path": "tokenizers/fineweb_pure_byte_260.json", "pad_id": 0, "unk_id": 3,
    }  # fmt: skip
    learned = manifest["tokenizers"][1]
    assert learned["model_path"] == f"tokenizers/fineweb_{size}_bpe.model"
    assert learned["vocab_path"] == f"tokenizers/fineweb_{size}_bpe.vocab"
    assert learned["source_spec"]["reuse_model_path"] == "mine.model"
    assert str(folder.path) not in (folder / "manifest.json").read_text()
    entry = {key: value for key, value in manifest["datasets"][0].items() if key != "stats"}
    assert entry == {
        "name": "fineweb10B_byte260", "tokenizer_name": "b", "tokenizer_kind": "byte", "path": "datasets/fineweb10B_byte260",
        "train_glob": "datasets/fineweb10B_byte260/fineweb_train_*.bin",
        "val_glob": "datasets/fineweb10B_byte260/fineweb_val_*.bin", "vocab_size": 260, "bos_id": 1, "eos_id": 2,
        "recommended_bigram_vocab_size": 1920,
    }  # fmt: skip


def test_what_is_exported_can_be_downloaded(folder):
    folder(chunk_tokens=5)
    plan = plan_files(folder.manifest(), "byte260", None, REPO)
    assert all((folder / name).is_file() for name in (*plan.tokenizer, *plan.val, *plan.train))
    assert len(plan.train) == 4


def test_the_exported_specs_export_the_same_again(folder, tmp_path):
    folder.docs(TEXTS)
    folder(BYTE, {"vocab_size": 290}, train_documents=30)
    again = Folder(tmp_path / "again", TEXTS)
    hub = Hub(REPO)
    hub.offline = True
    Export(again.path, load_specs(folder / "tokenizer_config.export.json"), hub, "datasets", 1, 500).run()
    assert again.manifest() == folder.manifest()


# Tokenizers


def raw_sentencepiece(texts, vocab_size):
    """A model as golf's own script trains it."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, model_type="bpe", vocab_size=vocab_size, character_coverage=0.999,
        byte_fallback=True, split_digits=True, normalization_rule_name="nmt_nfkc", add_dummy_prefix=False, pad_id=0, bos_id=1,
        eos_id=2, unk_id=3, hard_vocab_limit=False, minloglevel=4,
    )  # fmt: skip
    return model.getvalue()


def test_the_vocabulary_is_the_one_golfs_own_options_give(folder):
    texts = [*TEXTS, "zebra " * 700, "\0quagga " * 60, "  ", "\u2585okapi " * 60, ""]
    folder.docs(texts)
    folder({"vocab_size": 300})
    stripped = [text.replace("\0", " ").strip() for text in texts]
    expected = vocabulary_lines(raw_sentencepiece([text for text in stripped if text], 300))
    assert (folder / "tokenizers/fineweb_300_bpe.vocab").read_bytes() == expected
    assert [word in expected.decode() for word in ("quagga", "zebra", "okapi")] == [True, False, False]
    first = folder.stream("fineweb10B_sp300", "val")
    tokenizer = open_tokenizer(str(folder / "tokenizers/fineweb_300_bpe.model"))
    assert first == [1, *tokenizer.encode(TEXTS[0]).tolist()]


def test_the_vocabulary_file_is_the_published_one():
    model = shared("tokenizers/fineweb_1024_bpe.model")
    assert vocabulary_lines(model.read_bytes()) == model.with_suffix(".vocab").read_bytes()


def test_overrides_replace_any_setting_of_the_trainer(folder):
    folder.docs([*TEXTS, "zebra " * 700])
    folder({"vocab_size": 300, "trainer_overrides": {"user_defined_symbols": ["<x>"], "max_sentence_length": 10_000}})
    vocabulary = (folder / "tokenizers/fineweb_300_bpe.vocab").read_text()
    assert "<x>\t" in vocabulary and "zebra" in vocabulary


def test_only_the_first_documents_are_learned_from_if_so_asked(folder):
    folder.docs([*TEXTS, "quagga " * 50])
    folder({"vocab_size": 290, "tokenizer_train_docs": 9999}, train_documents=60)
    assert "quag" not in (folder / "tokenizers/fineweb_290_bpe.vocab").read_text()
    assert folder.manifest()["tokenizer_specs"][0]["tokenizer_train_docs"] == 60


def test_fewer_pieces_than_asked_for_are_taken_with_a_warning(folder):
    folder.docs(TEXTS)
    result = folder({"vocab_size": 5000})
    assert result.manifest["tokenizers"][0]["vocab_size"] < 1000
    assert "instead of 5,000" in result.warnings[0]


def test_a_vocabulary_too_small_for_the_text_is_refused_with_the_size_it_needs(folder):
    folder.docs(TEXTS)
    with pytest.raises(DataError, match=r"tokenizer sp_bpe_262: vocab_size 262 is too small for this text"):
        folder({"vocab_size": 262})


def test_a_model_is_used_again_even_in_its_own_place(folder):
    folder.docs(TEXTS)
    folder({"vocab_size": 290})
    model = folder / "tokenizers/fineweb_290_bpe.model"
    before = model.read_bytes()
    folder.docs(TEXTS[:9])
    folder({"vocab_size": 290}, reuse=[f"290={model}"])
    assert model.read_bytes() == before
    assert folder.manifest()["num_docs"] == 9


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no file"),
        (b"damaged", "not a SentencePiece model"),
        (sentencepiece_file(), "has 274 ids, but vocab_size is 290"),
    ],
)
def test_a_model_that_cannot_be_used_again_is_refused_before_anything_is_made(folder, tmp_path, content, said):
    if content is not None:
        (tmp_path / "m.model").write_bytes(content)
    with pytest.raises((ConfigError, DataError), match=f"tokenizer sp_bpe_290: .*{said}"):
        folder({"vocab_size": 290}, reuse=[f"290={tmp_path / 'm.model'}"])
    assert {path.name for path in folder.path.iterdir()} <= {"docs_selected.jsonl", ".download.lock"}


# The script


def run(capsys, *words, folder=ROOT / "data"):
    code = download_hf_docs_and_tokenize([str(word) for word in words], folder)
    return code, *capsys.readouterr()


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_the_script_prints_what_it_made_and_json_if_asked(folder, offline, capsys, monkeypatch):
    monkeypatch.setenv(golf_data.THREADS, "0")
    folder.docs(TEXTS)
    words = ["--output-root", folder.path, "--num-val-docs", "2", "--tokenizer-train-docs", "50", "--chunk-tokens", "1000"]
    code, out, err = run(capsys, *words)
    assert code == 0
    assert "fineweb10B_byte260: 260 ids, 60 documents\n  train: 58 documents" in out
    assert "warning: tokenizer sp_bpe_1024 has" in err
    code, out, _ = run(capsys, *words, "--json")
    assert json.loads(out)["kept"] == ["fineweb10B_sp1024", "fineweb10B_byte260"]
    assert json.loads(out)["manifest"] == folder.manifest()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--num-val-docs", "9"], 2, "validation needs 9 documents"),
        (["--reuse-sp-model", "1024=/none.model"], 2, "/none.model"),
        (["--tokenizer-config", "/none.json"], 2, "/none.json cannot be read: No such file"),
        (["--reuse-sp-model", "1024=a", "--reuse-sp-model", "1024=b"], 2, "two models"),
    ],
)
def test_a_mistake_is_one_line_and_the_exit_code_of_its_class(folder, offline, capsys, words, code, said):
    found, out, err = run(capsys, "--output-root", folder.path, *words)
    assert (found, out) == (code, "")
    line = err.splitlines()[-1]
    assert line.startswith("download_hf_docs_and_tokenize.py: error: ") and said in line


def test_a_variable_that_is_no_number_is_refused(folder, offline, capsys, monkeypatch):
    monkeypatch.setenv(golf_data.THREADS, "many")
    code, _, err = run(capsys, "--output-root", folder.path)
    assert code == 2 and f"{golf_data.THREADS}='many' is not a whole number" in err


def test_an_output_is_required(capsys):
    code, out, err = run(capsys)
    assert code == 2 and out == "" and "--output-root" in err


def test_the_program_exports_from_a_hub(repository, tmp_path):
    docs = lines(TEXTS)
    repository.commit(docs, sidecar(docs, docs_val=5), prefix="elsewhere/")
    home = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": repository.server.endpoint, "PYTHONPATH": str(ROOT / "src")}
    chosen = {"MATCHED_FINEWEB_REPO_ID": REPO, "MATCHED_FINEWEB_REMOTE_ROOT_PREFIX": "elsewhere"}
    (tmp_path / "specs.json").write_text(json.dumps([BYTE, {"vocab_size": 290}]))
    program = [sys.executable, ROOT / "data/download_hf_docs_and_tokenize.py", "--output-root", tmp_path / "out", "--json"]
    result = subprocess.run(
        [*program, "--tokenizer-config", tmp_path / "specs.json"],
        env={**os.environ, **home, **chosen},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    made = json.loads(result.stdout)["manifest"]
    assert made["docs_meta"]["remote_root"] == "elsewhere"
    assert [entry["stats"]["docs_val"] for entry in made["datasets"]] == [5, 5]
    shard = tmp_path / "out/datasets/fineweb10B_sp290/fineweb_train_000000.bin"
    assert len(open_shard(shard)) == made["datasets"][1]["stats"]["tokens_train"]


def test_real_documents_give_the_published_tokenizers_tokens(tmp_path):
    docs, model = shared("fineweb_sample/parameter_golf_verify_docs.jsonl"), shared("tokenizers/fineweb_1024_bpe.model")
    folder = Folder(tmp_path / "out")
    (folder / "docs_selected.jsonl").write_bytes(docs.read_bytes())
    folder({"vocab_size": 1024}, reuse=[f"1024={model}"], val_documents=50, chunk_tokens=10**6)
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    texts = [json.loads(line)["text"] for line in docs.read_text().splitlines()]
    expected = [token for text in texts[:50] for token in [1, *library.encode(text)]]
    assert folder.stream("fineweb10B_sp1024", "val") == expected
    assert (folder / "tokenizers/fineweb_1024_bpe.vocab").read_bytes() == model.with_suffix(".vocab").read_bytes()
