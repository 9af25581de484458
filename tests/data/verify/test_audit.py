import json
import lzma
import pickle
import random
import re
import shutil
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_files import write_shard
from toy_tokenizers import (
    SPACE,
    WORDS,
    byte_level_config,
    llama_config,
    sentencepiece_file,
    shared,
    toy_hf,
    toy_sentencepiece,
    wordpiece_config,
)
from typer.testing import CliRunner

from ingot.cli.data import verify_command
from ingot.data.formats.opener import open_tokens
from ingot.data.prepare.pipeline import write_dataset
from ingot.data.store.dataset import Dataset, identity
from ingot.data.store.documents import starts_at_marks
from ingot.data.tokenizers import ByteTokenizer, CharTokenizer, GPT2Tokenizer, SentencePieceTokenizer
from ingot.data.tokenizers.learn_vocabulary import train_tokenizer
from ingot.data.verify import audit as audit_module
from ingot.data.verify.audit import ComparedSplit, audit, count_documents, find_overlap, run_hashes
from ingot.errors import ConfigError, DataError

DRAW = random.Random(0)
VOCABULARY = ["".join(DRAW.choices("abcdefghiklmnoprstuvwy", k=DRAW.randint(2, 9))) for _ in range(900)]


def text(words: int = 120) -> str:
    """Sentences that share no run of words with others, as good as certainly."""
    return " ".join(DRAW.choice(VOCABULARY) + DRAW.choice(["", "", "", ",", "."]) for _ in range(words))


TRAIN, VAL = [text() for _ in range(12)], [text() for _ in range(5)]


def prepare(folder: Path, train=TRAIN, val=VAL, tokenizer=None, **options) -> Path:
    pieces = [*(("train", one) for one in train), *(("val", one) for one in val)]
    write_dataset(pieces, folder, tokenizer or ByteTokenizer(), source=None, **options)
    return folder


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    """A folder of three train shards without a fault; tests work on copies."""
    return prepare(tmp_path_factory.mktemp("sound") / "set", shard_tokens=3500)


@pytest.fixture
def folder(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "set")
    return tmp_path / "set"


def edit(folder: Path, change, sign=True) -> None:
    path = folder / "dataset.json"
    record = json.loads(path.read_text())
    change(record)
    if sign:
        record["fingerprint"] = identity(record)
    path.write_text(json.dumps(record))


def put_tokenizer(folder: Path, tokenizer, sign=True) -> None:
    facts = {
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "bos": tokenizer.bos,
        "fingerprint": tokenizer.fingerprint(),
        "spec": tokenizer.spec(),
    }
    edit(folder, lambda record: record.update(tokenizer=facts), sign)


def codes(folder: Path, **options) -> list[str]:
    return [finding.code for finding in audit(folder, **options).findings]


def bare(folder: Path, train=TRAIN, val=VAL, tokenizer=None) -> Path:
    """Golf's layout: shards and nothing else."""
    folder.mkdir(parents=True)
    tokenizer = tokenizer or ByteTokenizer()
    for split, texts in (("train", train), ("val", val)):
        ids = np.concatenate([tokenizer.encode_document(one) for one in texts])
        for number, part in enumerate(np.array_split(ids, 2)):
            write_shard(folder / f"fineweb_{split}_{number:06d}.bin", part)
    return folder


TOKENIZERS = {
    "byte": ByteTokenizer(),
    "char": CharTokenizer("".join(TRAIN + VAL) + "TBé "),
    "gpt2": GPT2Tokenizer(),
    "sentencepiece": toy_sentencepiece(),
    "byte-level": toy_hf(byte_level_config()),
    "llama": toy_hf(llama_config()),
    "llama-unmarked": toy_hf(llama_config(), ""),
}


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_sound_folder_of_any_tokenizer_has_no_findings(tmp_path, tokenizer):
    report = audit(prepare(tmp_path / "set", tokenizer=tokenizer, shard_tokens=1500))
    assert [finding.line for finding in report.findings] == []
    assert report.ok and report.tokenizer == tokenizer.kind
    assert report.splits["train"].documents == len(TRAIN)
    assert report.splits["val"].bytes == sum(map(len, VAL))
    assert [(one.documents, one.copied, one.similar, one.runs_found) for one in report.comparisons] == [(len(VAL), 0, 0, 0)]


def test_a_folder_without_validation_is_sound(tmp_path):
    report = audit(prepare(tmp_path / "set", val=[]))
    assert report.ok and report.comparisons == []


# What lies in the files


def test_a_flipped_byte_is_found_and_its_shard_named(folder):
    shard = folder / "train_000001.bin"
    content = bytearray(shard.read_bytes())
    content[-7] ^= 1
    shard.write_bytes(content)
    findings = audit(folder).findings
    assert findings[0].code == "shard-sha256" and findings[0].file == str(shard)
    assert {finding.code for finding in findings} <= {"shard-sha256", "token-range", "document-marks", "byte-count"}


@pytest.mark.parametrize(("change", "said"), [(-2, "is cut short"), (-3000, "is cut short"), (2, "is too long")])
def test_a_shard_of_another_size_is_one_finding(folder, change, said):
    shard = folder / "train_000000.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:change] if change < 0 else content + bytes(change))
    (finding,) = audit(folder).findings
    assert (finding.code, finding.file) == ("shard-size", str(shard))
    assert said in finding.problem


@pytest.mark.parametrize("content", [b"", bytes(1023), bytes(4000), struct.pack("<3i", 20240520, 3, 0) + bytes(1012)])
def test_a_shard_that_does_not_begin_as_one_is_one_finding(folder, content):
    (folder / "val_000000.bin").write_bytes(content)
    assert codes(folder) == ["shard-header"]


def test_a_missing_shard_is_one_finding_and_the_others_are_still_compared(folder, tmp_path):
    (folder / "train_000001.bin").unlink()
    report = audit(folder)
    assert [finding.code for finding in report.findings] == ["shard-missing"]
    assert report.comparisons[0].documents == len(VAL)


def test_a_shard_of_other_tokens_than_the_description_says_is_found(folder):
    (folder / "val_000000.bin").unlink()
    write_shard(folder / "val_000000.bin", np.array([1, 70, 71], np.uint16))
    (finding,) = audit(folder).findings
    assert finding.code == "shard-size" and "holds 3 tokens but dataset.json records" in finding.problem


@settings(max_examples=40)
@given(st.data())
def test_damage_anywhere_is_found_and_never_stops_the_audit(sound, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged") / "set"
    shutil.copytree(sound, folder)
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    report = audit(folder)
    assert not report.ok or path.name == "dataset.json"  # which says some things that nothing depends on
    assert all("\n" not in finding.line for finding in report.findings)


def test_every_fault_is_listed_and_not_only_the_first(folder):
    (folder / "train_000000.bin").write_bytes(b"no shard")
    (folder / "train_000002.bin").unlink()
    (folder / "val.index").write_bytes(bytes(8))
    shard = folder / "train_000001.bin"
    shard.write_bytes(shard.read_bytes()[:-2] + b"\x05\x00")
    edit(folder, lambda record: record["splits"]["train"].update(bytes=1), sign=False)
    found = codes(folder)
    assert {"shard-header", "shard-missing", "document-index", "shard-sha256", "dataset-json"} <= set(found)
    assert found.count("dataset-json") == 2  # the fingerprint, and shards that do not add up


def test_an_id_outside_the_vocabulary_is_found_where_it_stands(folder):
    shard = folder / "val_000000.bin"
    ids = np.fromfile(shard, "<u2")[512:]
    ids[[40, 90]] = 300, 260
    shard.unlink()
    sha256 = write_shard(shard, ids)
    edit(folder, lambda record: record["splits"]["val"]["shards"][0].update(sha256=sha256))
    finding = next(one for one in audit(folder).findings if one.code == "token-range")
    assert (finding.file, finding.place) == (str(shard), "token 40")
    assert "first of 2 tokens outside" in finding.problem


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda starts: starts[:-1], "48 bytes for 5 documents, but has 40"),
        (lambda starts: [1, *starts[1:]], "goes from token 1 to"),
        (lambda starts: [*starts[:-1], starts[-1] + 1], "goes from token 0 to"),
        (lambda starts: [0, 0, *starts[2:]], "does not increase: document 0 begins at 0 and the next at 0"),
    ],
)
def test_a_damaged_document_index_is_one_finding(folder, change, said):
    path = folder / "val.index"
    starts = change(np.fromfile(path, "<u8").tolist())
    path.write_bytes(struct.pack(f"<{len(starts)}Q", *starts))
    (finding,) = audit(folder).findings
    assert (finding.code, finding.file) == ("document-index", str(path))
    assert said in finding.problem


def test_documents_that_do_not_start_at_their_marks_are_found(folder):
    path = folder / "val.index"
    starts = np.fromfile(path, "<u8")
    starts[2] += 3
    path.write_bytes(starts.tobytes())
    edit(folder, lambda record: record["splits"]["val"].pop("document_index_sha256"), sign=False)  # as in older folders
    (finding,) = audit(folder).findings
    assert finding.code == "document-marks" and finding.place == f"token {starts[2] - 3:,}"
    assert "1 documents start without BOS and 1 BOS tokens are inside documents" in finding.problem


def test_an_index_with_a_moved_start_is_found_where_no_mark_tells(tmp_path):
    folder = prepare(tmp_path / "set", tokenizer=CharTokenizer("".join(TRAIN + VAL)))
    starts = np.fromfile(folder / "val.index", "<u8")
    starts[2] += 3
    (folder / "val.index").write_bytes(starts.tobytes())
    (finding,) = audit(folder).findings
    assert (finding.code, finding.file) == ("document-index", str(folder / "val.index"))
    assert "has changed since it was written" in finding.problem


def test_a_folder_from_before_indexes_had_checksums_is_the_same_data_and_whole(folder):
    before = audit(folder).fingerprint
    for split in ("train", "val"):
        edit(folder, lambda record, split=split: record["splits"][split].pop("document_index_sha256"), sign=False)
    assert (audit(folder).findings, audit(folder).fingerprint) == ([], before)


def test_a_vocabulary_that_folds_its_own_text_too_much_is_not_called_the_wrong_one(tmp_path):
    spaced = [one.replace(" ", "  ") for one in ["The cats " * 30, "that cat " * 30]]
    folder = prepare(tmp_path / "set", spaced[:1], spaced[1:], toy_sentencepiece())
    found = [finding for finding in audit(folder).findings if finding.code == "byte-count"]
    assert len(found) == 2
    for finding in found:
        assert "not bits per byte of the original text" in finding.advice and "--byte-gap" in finding.advice
        assert "that made the tokens" not in finding.advice


def test_a_mark_inside_a_document_is_found(folder):
    shard = folder / "val_000000.bin"
    ids = np.fromfile(shard, "<u2")[512:]
    ids[40] = 1
    shard.unlink()
    sha256 = write_shard(shard, ids)
    edit(folder, lambda record: record["splits"]["val"]["shards"][0].update(sha256=sha256))
    assert codes(folder) == ["document-marks"]


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"[]", b'{"format": "ingot-dataset"}'])
def test_a_description_that_cannot_be_read_is_found(folder, content):
    (folder / "dataset.json").write_bytes(content)
    assert codes(folder) == ["dataset-json"]


def test_an_edited_description_is_found(folder):
    edit(folder, lambda record: record.update(fingerprint="0" * 64), sign=False)
    assert codes(folder) == ["dataset-json"]


# Whether the tokenizer fits


def other_pieces() -> SentencePieceTokenizer:
    """As many pieces as the toy has, of other lengths."""
    return toy_sentencepiece([SPACE, *("z" * number for number in range(1, len(WORDS)))])


@pytest.fixture
def sentences(tmp_path):
    train = ["The cats " * number + "A cat a b é" for number in range(9, 20)]
    return prepare(tmp_path / "sp", train, ["The cat eats the hat The cat A the cat cats"] * 2, toy_sentencepiece())


@pytest.mark.parametrize("sign", [True, False])
def test_a_tokenizer_that_was_replaced_by_one_of_the_same_size_is_found(sentences, sign):
    assert other_pieces().vocab_size == toy_sentencepiece().vocab_size
    put_tokenizer(sentences, other_pieces(), sign)
    found = codes(sentences, overlap_share=1)
    assert {"byte-count", "tokenizer-mismatch"} <= set(found)
    assert ("dataset-json" in found) is not sign


def test_a_tokenizer_that_starts_documents_with_another_id_is_found_by_its_marks(folder):
    other = toy_hf(byte_level_config())
    assert (other.vocab_size, other.bos) == (260, 0)
    put_tokenizer(folder, other)
    findings = audit(folder).findings
    assert {"document-marks", "tokenizer-mismatch"} <= {finding.code for finding in findings}
    counted = next(finding for finding in findings if finding.code == "document-marks")
    assert f"{len(TRAIN)} documents start without BOS" in counted.problem


def test_a_tokenizer_under_the_fingerprint_of_another_is_found(folder):
    edit(folder, lambda record: record["tokenizer"].update(spec=toy_hf(byte_level_config()).spec()))
    assert "tokenizer-mismatch" in codes(folder)


def test_another_tokenizer_than_the_one_inside_is_a_finding(folder, tmp_path):
    (finding,) = audit(folder, tokenizer="gpt2").findings
    assert finding.code == "tokenizer-mismatch"
    assert "its tokenizer (byte, 260 ids" in finding.problem and "is not the given tokenizer (gpt2, 50,257 ids" in finding.problem
    assert codes(folder, tokenizer="byte") == []


def test_a_tokenizer_that_cannot_be_read_leaves_the_files_to_check(folder):
    edit(folder, lambda record: record["tokenizer"].update(spec={"kind": "sentencepiece", "xz": "AAAA"}))
    (folder / "val_000000.bin").write_bytes(b"")
    assert codes(folder) == ["tokenizer", "shard-header"]


def test_text_that_the_tokenizer_folds_too_much_of_is_a_finding(tmp_path):
    folder = prepare(tmp_path / "set", ["The    cats " * 9] * 3, ["A     cat"], toy_sentencepiece())
    finding = next(one for one in audit(folder, overlap_share=1).findings)
    assert finding.code == "byte-count" and "% (the limit is 5.00%)" in finding.problem
    assert codes(folder, byte_gap=0.9, overlap_share=1) == []


def test_a_vocabulary_that_was_trained_on_its_text_passes_with_the_white_space_it_folds(tmp_path):
    lines = [f"Line {i} of a play, in which a lord speaks to another lord{'.' * (i % 3)}\n" for i in range(400)]
    text = tmp_path / "text.txt"
    text.write_text("".join(line + "\n" * (i % 2) for i, line in enumerate(lines)))
    tokenizer = train_tokenizer([text], tmp_path / "mine.model", "sentencepiece", 320)
    folder = prepare(tmp_path / "set", [text.read_text()], ["A lord of no play at all speaks here.\n\nAnd there."], tokenizer)
    split = Dataset.open(folder).split("train")
    assert 0.005 < 1 - split.piece_bytes / split.bytes < 0.05
    assert codes(folder) == []
    assert codes(folder, byte_gap=0.005)[0] == "byte-count"


def test_a_lossless_tokenizer_may_not_be_one_byte_off(folder):
    def change(record):
        record["splits"]["val"]["bytes"] += 1
        record["splits"]["val"]["shards"][-1]["bytes"] += 1

    edit(folder, change)
    (finding,) = audit(folder).findings
    assert finding.code == "byte-count" and "this tokenizer is lossless" in finding.problem


TOYS = [*TOKENIZERS.values(), toy_hf(wordpiece_config())]


@settings(max_examples=60)
@given(st.data())
def test_bytes_are_counted_as_the_tokenizer_counts_them(tmp_path_factory, data):
    tokenizer = data.draw(st.sampled_from(TOYS))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), min_size=1, max_size=40))
    starts = np.array([0, *sorted(data.draw(st.sets(st.integers(1, len(ids)))) | {len(ids)})])
    folder = tmp_path_factory.mktemp("count")
    write_shard(folder / "train_0.bin", np.array(ids, np.uint16))
    split = open_tokens(folder).split("train")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_module, "CHUNK_TOKENS", data.draw(st.integers(1, 9)))
        counts, _ = count_documents(split, tokenizer, starts, lambda tokens: None)
    previous = np.array([-1, *ids[:-1]])
    previous[starts[:-1]] = -1
    assert counts.piece_bytes == tokenizer.target_bytes(previous, ids).sum()
    assert counts.ids.sum() == len(ids) and all(counts.ids[i] == ids.count(i) for i in ids)
    assert counts.marks.tolist() == [place for place, token in enumerate(ids) if token == tokenizer.bos]


# Validation in train


def test_a_validation_document_in_train_is_found_with_its_place(tmp_path):
    folder = prepare(tmp_path / "set", [*TRAIN[:7], VAL[3], *TRAIN[7:]])
    report = audit(folder)
    (finding,) = report.findings
    assert finding.code == "overlap-documents" and finding.place.startswith("document 3 of val, token ")
    begin = sum(len(one) + 1 for one in TRAIN[:7])
    assert f"equals document 7 of train ({folder / 'train_000000.bin'}, token {begin:,}), token for token" in finding.problem
    assert (report.comparisons[0].copied, report.comparisons[0].similar) == (1, 0)


@pytest.mark.parametrize("change", [str.upper, lambda one: one.replace(" ", "\n \t"), lambda one: f'  "{one}" '])
def test_a_copy_in_other_case_white_space_or_punctuation_is_found(tmp_path, change):
    (finding,) = audit(prepare(tmp_path / "set", [*TRAIN, change(VAL[0])])).findings
    assert finding.code == "overlap-documents"
    assert f"equals document {len(TRAIN)} of train" in finding.problem and "except for case, white space" in finding.problem


def test_a_validation_document_inside_a_longer_train_document_is_found(tmp_path):
    (finding,) = audit(prepare(tmp_path / "set", [*TRAIN, f"{text(77)} {VAL[4]} {text(50)}"])).findings
    assert finding.code == "overlap-ngrams" and finding.place.startswith("document 4 of val")
    assert "100% of its 13-word n-grams are in train" in finding.problem and "most of them in document 12 of" in finding.problem


def test_a_copy_with_small_edits_is_found_with_the_share_that_is_the_same(tmp_path):
    words = VAL[1].split()
    words[30], words[90] = "edited", "changed"
    (finding,) = audit(prepare(tmp_path / "set", [*TRAIN, " ".join(words)])).findings
    runs = len(words) - 12
    assert finding.code == "overlap-ngrams"
    assert f"{(runs - 2 * 13) / runs:.0%} of its 13-word n-grams" in finding.problem


def test_a_document_that_only_quotes_train_is_no_finding_until_the_limit_says_so(tmp_path):
    quoted = " ".join(TRAIN[2].split()[:40])
    folder = prepare(tmp_path / "set", val=[*VAL, f"{text(100)} {quoted}"])
    assert codes(folder) == []
    assert codes(folder, overlap_share=0.1) == ["overlap-ngrams"]
    assert codes(folder, overlap_share=0.1, ngram_words=41) == []


def test_short_documents_are_compared_whole(tmp_path):
    findings = audit(prepare(tmp_path / "set", [*TRAIN, "two words", "!?"], ["two words", "!?", "?!", "other words"])).findings
    assert [(one.code, one.place.split(" of ")[0]) for one in findings] == [
        ("overlap-documents", "document 0"),
        ("overlap-documents", "document 1"),
    ]


def test_documents_without_text_are_no_copies_of_each_other(tmp_path):
    ids = np.array([1, 1, 70, 1], np.uint16)
    for split in ("train", "val"):
        write_shard(tmp_path / f"fineweb_{split}_000000.bin", ids + np.array([0, 0, split == "val", 0], np.uint16))
    assert codes(tmp_path, tokenizer="byte") == []


@pytest.mark.parametrize("tokenizer", ["byte", "gpt2", "llama-unmarked", "char"])
def test_validation_is_looked_for_in_another_folder_of_any_tokenizer(folder, tmp_path, tokenizer):
    other = prepare(tmp_path / "other", [*TRAIN, VAL[2]], [], TOKENIZERS[tokenizer])
    report = audit(folder, against=other)
    (finding,) = report.findings
    assert finding.code == "overlap-documents" and finding.place.startswith("document 2 of val")
    assert str(other) in finding.problem
    assert [(one.against, one.copied) for one in report.comparisons] == [(str(folder), 0), (str(other), 1)]


def test_the_folder_itself_is_not_compared_twice(folder):
    assert len(audit(folder, against=folder / ".." / folder.name).comparisons) == 1


def test_faults_of_the_other_folder_are_findings_too(folder, tmp_path):
    other = prepare(tmp_path / "other", shard_tokens=3500)
    (other / "train_000000.bin").write_bytes(b"")
    (finding,) = audit(folder, against=other).findings
    assert (finding.code, finding.file) == ("shard-header", str(other / "train_000000.bin"))


def test_folders_that_cannot_be_compared_are_refused(folder, tmp_path):
    no_val = bare(tmp_path / "bare", val=VAL[:1])
    for path in no_val.glob("*_val_*"):
        path.unlink()
    with pytest.raises(ConfigError, match="has no validation split to compare"):
        audit(no_val, tokenizer="byte", against=folder)
    with pytest.raises(DataError, match="no data at"):
        audit(folder, against=tmp_path / "gone")


def sides(tmp_path: Path, train: list[str], val: list[str], tokenizer=None) -> tuple[ComparedSplit, ComparedSplit]:
    folder = Dataset.open(prepare(tmp_path, train, val, tokenizer))
    indices = (np.fromfile(tmp_path / f"{name}.index", "<u8").astype(np.int64) for name in ("val", "train"))
    return tuple(
        ComparedSplit(folder.splits[name], index, folder.tokenizer) for name, index in zip(("val", "train"), indices, strict=True)
    )


@settings(max_examples=40)
@given(st.data())
def test_the_share_of_every_document_is_that_of_its_runs_of_words(tmp_path_factory, data):
    documents = st.lists(st.text("ab  ,", min_size=1, max_size=40), min_size=1, max_size=5)
    train, val, count = data.draw(documents), data.draw(documents), data.draw(st.integers(1, 4))

    def runs(one):
        words = one.replace(",", " ").split()
        return [tuple(words[i : i + count]) for i in range(len(words) - count + 1)]

    known = {run for one in train for run in runs(one)}
    found, matches = find_overlap(*sides(tmp_path_factory.mktemp("o") / "set", train, val), count, 0.5)
    assert found.runs == sum(len(runs(one)) for one in val)
    assert found.runs_found == sum(run in known for one in val for run in runs(one))
    words = [one.replace(",", " ").split() or one for one in train]
    for number, one in enumerate(val):
        match = next((match for match in matches if match.document == number), None)
        mine = one.replace(",", " ").split() or one
        shared_runs = sum(run in known for run in runs(one))
        if mine in words:
            assert match.kind == ("tokens" if train[match.train] == one else "words") and words[match.train] == mine
        else:
            assert (match is not None) == (2 * shared_runs > len(runs(one)))
            assert match is None or (match.kind, match.share) == ("runs", shared_runs / len(runs(one)))


def test_a_copied_document_longer_than_a_block_is_found_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(audit_module, "READ_TOKENS", 100)
    (finding,) = audit(prepare(tmp_path / "set", [*TRAIN[:3], VAL[0], *TRAIN[3:]])).findings
    assert finding.code == "overlap-documents" and "equals document 3 of train" in finding.problem


def test_memory_does_not_grow_with_train(tmp_path, monkeypatch):
    monkeypatch.setattr(audit_module, "READ_TOKENS", 2000)
    peaks = []
    for repeats in (2, 20):
        val, train = sides(tmp_path / str(repeats), TRAIN * repeats, VAL[:1])
        tracemalloc.start()
        find_overlap(val, train, 13, 0.5)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


# Words


@pytest.mark.parametrize(
    ("train", "val", "kind"),
    [
        ("Élan vital, “again”", "élan\u00a0VITAL again", "words"),  # case, quotes and spaces of any script do not count
        ("ab cd", "abcd", None),
        ("ab cd", "cd ab", None),
        ("今日は良い天気です", "昨日は良い天気です", "runs"),  # every character from U+3000 on is a word
    ],
)
def test_words_are_compared_without_case_white_space_and_punctuation_in_any_script(tmp_path, train, val, kind):
    _, matches = find_overlap(*sides(tmp_path / "set", [train], [val]), 5, 0.1)
    assert [match.kind for match in matches] == [kind] * (kind is not None)


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12), st.integers(1, 6))
def test_runs_of_words_are_equal_only_if_their_words_are(first, second, count):
    hashed = {}
    for document in (first, second):
        hashes = run_hashes(np.array(document, np.uint64) + np.uint64(1 << 40), count).tolist()
        runs = [tuple(document[place : place + count]) for place in range(len(document) - count + 1)]
        assert len(hashes) == len(runs)
        for run, number in zip(runs, hashes, strict=True):
            assert hashed.setdefault(run, number) == number
    assert len(set(hashed.values())) == len(hashed)


# Bare shards


@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"])
def test_bare_shards_are_checked_with_the_tokenizer_that_is_given(tmp_path, tokenizer):
    folder = bare(tmp_path / "bare", tokenizer=TOKENIZERS[tokenizer])
    write_shard(folder / "fineweb_val_bytes_000000.bin", np.array([9999], np.uint16))  # counts of bytes, no tokens
    report = audit(folder, tokenizer=tokenizer)
    assert report.findings == []
    assert (report.splits["train"].documents, report.splits["val"].documents) == (len(TRAIN), len(VAL))
    assert (report.splits["val"].bytes, report.splits["val"].piece_bytes) == (None, sum(map(len, VAL)))


def test_bare_shards_without_a_tokenizer_ask_for_one(tmp_path):
    with pytest.raises(ConfigError, match="does not name its tokenizer; name it with --tokenizer"):
        audit(bare(tmp_path / "bare"))


def test_faults_of_bare_shards_are_found(tmp_path):
    folder = bare(tmp_path / "bare", [*TRAIN, VAL[0]])
    shard = folder / "fineweb_train_000000.bin"
    shard.write_bytes(shard.read_bytes()[:-100])
    (folder / "fineweb_val_000001.bin").write_bytes(bytes(2000))
    assert sorted(codes(folder, tokenizer="byte")) == ["overlap-documents", "shard-header", "shard-size"]


def test_the_wrong_tokenizer_for_bare_shards_is_found(tmp_path):
    folder = bare(tmp_path / "bare")
    assert set(codes(folder, tokenizer="gpt2")) == {"document-marks", "tokenizer-mismatch"}
    wide = bare(tmp_path / "wide", tokenizer=GPT2Tokenizer())
    assert {"token-range", "document-marks"} <= set(codes(wide, tokenizer="byte"))


def quoting(count: int) -> list[str]:
    """Documents with quotes, GPT-2's id of which is the mark of bytes: between them little is left of a document."""
    return [" ".join(f'"{word}"' if DRAW.random() < 0.2 else word for word in text(80).split()) for _ in range(count)]


def test_tokens_that_cannot_be_the_tokenizers_are_neither_counted_nor_compared(verify, tmp_path):
    folder = bare(tmp_path / "wide", quoting(30), quoting(8), GPT2Tokenizer())
    report = audit(folder, tokenizer="byte")
    assert {finding.code for finding in report.findings} == {"token-range", "document-marks"}
    assert report.comparisons == []
    lines = verify(folder, "--tokenizer", "byte").stdout.splitlines()
    assert lines[1].split() == ["split", "documents", "tokens", "bytes", "bytes/token"]
    tokens = [f"{report.splits[name].tokens:,}" for name in ("train", "val")]
    assert [line.split() for line in lines[2:4]] == [[*row, "-", "-"] for row in zip(("train", "val"), "--", tokens, strict=True)]


def test_tokens_that_cannot_be_the_tokenizers_are_not_compared_from_another_folder_either(tmp_path):
    folder = prepare(tmp_path / "set")
    other = bare(tmp_path / "wide", quoting(30), tokenizer=GPT2Tokenizer())
    report = audit(folder, tokenizer="byte", against=other)
    assert [finding.code for finding in report.findings] == ["token-range", "document-marks"]
    assert [one.against for one in report.comparisons] == [str(folder)]


def test_bytes_that_wrong_marks_explain_are_no_finding_of_their_own(folder):
    put_tokenizer(folder, toy_hf(byte_level_config()))
    assert set(codes(folder)) == {"document-marks", "tokenizer-mismatch"}


def published(root: Path) -> Path:
    """A folder as a download leaves it, with its tokenizer and its manifest.json."""
    sentences = ["The cats " * number + text(9) for number in range(9, 20)]
    folder = bare(root / "datasets/fineweb10B_sp", sentences, [text(40)], toy_sentencepiece())
    (root / "tokenizers").mkdir()
    (root / "tokenizers/toy.model").write_bytes(sentencepiece_file())
    dataset = {"name": folder.name, "tokenizer_name": "toy"}
    tokenizer = {"name": "toy", "model_path": "tokenizers/toy.model"}
    (root / "manifest.json").write_text(json.dumps({"datasets": [dataset], "tokenizers": [tokenizer]}))
    return folder


def test_published_shards_are_checked_by_their_manifest(tmp_path):
    report = audit(published(tmp_path))
    assert (report.findings, report.tokenizer) == ([], "sentencepiece")


def test_another_tokenizer_than_the_manifest_names_is_found(tmp_path):
    folder = published(tmp_path)
    (tmp_path / "other.model").write_bytes(other_pieces().contents)
    found = audit(folder, tokenizer=str(tmp_path / "other.model")).findings
    assert found[0].code == "tokenizer-mismatch" and "its tokenizer (sentencepiece" in found[0].problem


def test_published_bytes_need_no_tokenizer_file(tmp_path):
    folder = bare(tmp_path / "datasets/fineweb10B_byte260")
    dataset = {"name": folder.name, "tokenizer_name": "bytes", "stats": {}}
    tokenizer = {"name": "bytes", "kind": "byte", "path": "tokenizers/fineweb_pure_byte_260.json"}
    (tmp_path / "manifest.json").write_text(json.dumps({"datasets": [dataset], "tokenizers": [tokenizer]}))
    assert audit(folder).ok


@pytest.mark.parametrize("content", ["", "[]", '{"datasets": 3}', '{"datasets": [{"name": "bare"}], "tokenizers": []}'])
def test_a_manifest_that_says_nothing_is_passed_over(tmp_path, content):
    folder = bare(tmp_path / "datasets/bare")
    (tmp_path / "manifest.json").write_text(content)
    assert audit(folder, tokenizer="byte").ok


def test_shards_of_32_bits_are_checked_too(tmp_path):
    folder = bare(tmp_path / "bare")
    shard = folder / "fineweb_train_000000.bin"
    ids = np.fromfile(shard, "<u2")[512:].astype("<u4")
    header = struct.pack("<3i", 20240801, 7, len(ids)) + bytes(1012)
    shard.write_bytes(header + ids.tobytes())
    assert codes(folder, tokenizer="byte") == []
    shard.write_bytes(header + ids.tobytes()[:-4])
    assert codes(folder, tokenizer="byte") == ["shard-size"]


def test_a_manifest_cannot_name_a_file_outside_its_folder(tmp_path):
    folder = published(tmp_path / "root")
    manifest = json.loads((tmp_path / "root/manifest.json").read_text())
    manifest["tokenizers"][0]["model_path"] = "../elsewhere.model"
    (tmp_path / "root/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="name it with --tokenizer"):
        audit(folder)


def test_a_model_without_a_piece_for_a_space_is_found(tmp_path):
    folder = bare(tmp_path / "bare")
    model = tmp_path / "no_space.model"
    model.write_bytes(sentencepiece_file([word for word in WORDS if word != SPACE]))
    (finding,) = audit(folder, tokenizer=str(model)).findings
    assert (finding.code, finding.file) == ("space-piece", str(model))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no token data at"),
        ({"a.txt": b"text"}, "holds text"),
        ({"train.bin": bytes(8) + b"\1" * 4000}, "cannot be inspected or verified; convert it with: ingot data"),
    ],
)
def test_a_folder_that_is_neither_says_what_to_do(tmp_path, files, said):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        audit(tmp_path, tokenizer="byte")


def test_the_command_that_is_advised_for_another_format_has_its_tokenizer(tmp_path):
    (tmp_path / "train.bin").write_bytes(bytes(8) + b"\1" * 4000)
    with pytest.raises(DataError, match=r"--to ingot --tokenizer NAME --output DIR$"):
        audit(tmp_path)
    itos = dict(enumerate("abc" + "".join(map(chr, range(1000, 1300)))))
    meta = {"vocab_size": len(itos), "itos": itos, "stoi": {letter: token for token, letter in itos.items()}}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    with pytest.raises(DataError, match=r"--to ingot --output DIR$"):  # nanoGPT's characters are in the folder
        audit(tmp_path)


# The command


@pytest.fixture
def verify():
    app = typer.Typer()
    app.command()(verify_command)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def test_the_command_says_whole_and_exits_with_0(verify, folder):
    result = verify(folder)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"{folder}: whole; byte tokenizer, 260 ids"
    assert lines[1].split() == ["split", "documents", "tokens", "bytes", "bytes/token"]
    assert lines[4].startswith(f"of {len(VAL)} validation documents, 0 are copies")


def test_the_command_prints_a_line_for_each_finding_and_exits_with_3(verify, folder, tmp_path):
    (folder / "train_000000.bin").unlink()
    (folder / "val.index").unlink()
    result = verify(folder)
    assert result.exit_code == 3
    assert result.stdout.splitlines()[0].startswith(f"{folder}: 2 findings")
    assert [line.split(":")[0] for line in result.stdout.splitlines()[-2:]] == ["shard-missing", "document-index"]
    assert result.stdout.splitlines()[-1].startswith(f"document-index: {folder / 'val.index'}: cannot be read: No such file")


def test_the_command_as_json(verify, tmp_path):
    result = verify(prepare(tmp_path / "set", [*TRAIN, VAL[0]]), "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 3 and report["ok"] is False
    assert report["splits"]["val"]["piece_bytes"] == sum(map(len, VAL))
    assert set(report["findings"][0]) == {"code", "file", "place", "problem", "advice"}
    assert report["comparisons"][0]["copied"] == 1


def test_the_command_does_not_fill_the_terminal_with_one_kind_of_finding(verify, tmp_path):
    result = verify(prepare(tmp_path / "set", [f"number {n}" for n in range(30)], [f"number {n}" for n in range(25)]))
    assert sum(line.startswith("overlap-documents: ") for line in result.stdout.splitlines()) == 21
    assert result.stdout.splitlines()[-1] == "overlap-documents: 5 more findings; --json lists all"


@pytest.mark.parametrize(
    "words", [["--ngram-words", "0"], ["--ngram-words", str(10**20)], ["--overlap-share", "1.1"], ["--byte-gap", "-1"]]
)
def test_a_limit_that_makes_no_sense_is_refused(verify, folder, words):
    result = verify(folder, *words)
    assert isinstance(result.exception, ConfigError) and words[0] in str(result.exception)


def test_limits_reach_the_audit(verify, tmp_path):
    quoted = " ".join(TRAIN[2].split()[:30])
    folder = prepare(tmp_path / "set", val=[f"{text(100)} {quoted}"])
    assert verify(folder).exit_code == 0
    assert verify(folder, "--overlap-share", "0.1").exit_code == 3
    assert verify(folder, "--overlap-share", "0.1", "--ngram-words", "31").exit_code == 0
    assert verify(folder, "--tokenizer", "gpt2").exit_code == 3
    assert verify(folder, "--against", prepare(tmp_path / "b", [*TRAIN, VAL[0]])).exit_code == 0


def test_progress_is_told_to_its_end(folder, tmp_path):
    told: list[tuple[int, int]] = []
    other = prepare(tmp_path / "other")
    audit(folder, against=other, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] and told == sorted(told) and len({total for _, total in told}) == 1


def test_the_codes_that_findings_have_are_those_that_the_documents_explain():
    page = (Path(__file__).parents[3] / "docs/data-audit.md").read_text()
    data = Path(audit_module.__file__).parents[1]
    code = "\n".join(path.read_text() for folder in ("store", "formats", "verify") for path in (data / folder).glob("*.py"))
    explained = re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)
    assert len(explained) == 15
    assert [name for name in explained if f'"{name}"' not in code] == []
    assert set(re.findall(r'DataProblem\(\s*"([\w-]+)"', code)) <= set(explained)


# Real text


def test_real_text_is_clean_and_a_planted_document_is_found(tmp_path):
    model = SentencePieceTokenizer(shared("tokenizers/fineweb_1024_bpe.model").read_bytes())
    with lzma.open(shared("corpus/val.jsonl.xz"), "rt") as lines:
        texts = [json.loads(next(lines))["text"][:3000] for _ in range(300)]
    clean = prepare(tmp_path / "clean", texts[60:], texts[:60], model)
    assert codes(clean) == []
    words = texts[7].split()
    words[len(words) // 2] = "something"
    planted = prepare(tmp_path / "planted", [*texts[60:], texts[5], " ".join(words)], texts[:60], model)
    findings = audit(planted).findings
    assert [(one.code, one.place.split(" of ")[0]) for one in findings] == [
        ("overlap-documents", "document 5"),
        ("overlap-ngrams", "document 7"),
    ]


def test_marks_alone_say_where_documents_begin():
    assert starts_at_marks(9, np.array([0, 4])).tolist() == [0, 4, 9]
    assert starts_at_marks(9, np.array([3])).tolist() == [0, 3, 9]
    assert starts_at_marks(0, np.empty(0, np.int64)).tolist() == [0]
