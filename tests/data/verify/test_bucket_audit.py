"""Buckets in `ingot data inspect` and `verify`: gpt-simple's pairs as they lie, and prepared folders that keep buckets."""

import pytest
from bucket_files import EOS, documents_of, write_buckets

from ingot.data.formats.convert import convert
from ingot.data.formats.opener import open_tokens
from ingot.data.verify.audit import audit, inspect
from ingot.errors import ConfigError, DataError

BUCKETS = {"books": documents_of("b", 8), "web": documents_of("w", 20)}
VAL = {"books": documents_of("d", 4), "web": documents_of("z", 4)}


@pytest.fixture
def pairs(tmp_path):
    return write_buckets(tmp_path / "pairs", BUCKETS, VAL)


@pytest.fixture
def prepared(pairs, tmp_path):
    convert(open_tokens(pairs), tmp_path / "prepared", "ingot", tokenizer="byte")
    return tmp_path / "prepared"


def test_pairs_are_inspected_bucket_by_bucket(pairs):
    found = inspect(pairs, tokenizer="byte").splits
    assert list(found) == ["train", "train/books", "train/web", "val", "val/books", "val/web"]
    assert (found["train/web"].documents, found["train/web"].tokens) == (20, sum(map(len, BUCKETS["web"])))
    assert found["train"].documents == 28 and found["val/books"].documents == 4
    assert found["train/books"].beginnings[0]["text"].startswith("b0000")
    assert found["train/web"].vocabulary["used"] < found["train"].vocabulary["used"]


def test_a_prepared_folder_is_inspected_bucket_by_bucket(prepared):
    found = inspect(prepared, "train").splits
    assert list(found) == ["train", "train/books", "train/web"]
    assert found["train/books"].bytes == sum(len(document) - 1 for document in BUCKETS["books"])
    assert found["train/web"].piece_bytes == found["train/web"].bytes


@pytest.mark.parametrize("kind", ["pairs", "prepared"])
def test_sound_data_in_buckets_has_no_findings(request, kind):
    folder = request.getfixturevalue(kind)
    report = audit(folder, tokenizer="byte" if kind == "pairs" else None)
    assert report.findings == []
    assert {name: split.documents for name, split in report.splits.items() if "/" in name} == {
        "train/books": 8, "train/web": 20, "val/books": 4, "val/web": 4,
    }  # fmt: skip
    assert len(report.comparisons) == 1


def test_what_is_wrong_with_pairs_is_a_list(pairs):
    (pairs / "train" / "web" / "00000.idx").write_bytes(b"GPTX")
    path = pairs / "train" / "books" / "00000.bin"
    path.write_bytes(path.read_bytes()[:-2])
    findings = audit(pairs, tokenizer="byte").findings
    assert [finding.code for finding in findings] == ["pair", "pair"]
    assert "00000.bin" in findings[0].line and "00000.idx" in findings[1].line
    with pytest.raises(DataError, match=r"00000\.bin"):
        inspect(pairs, tokenizer="byte")


def test_a_validation_document_that_is_trained_on_is_found_in_pairs(tmp_path):
    folder = write_buckets(tmp_path / "copied", BUCKETS)  # whose validation is the first of train
    assert "overlap-documents" in {finding.code for finding in audit(folder, tokenizer="byte").findings}


def test_another_tokenizer_is_noticed(pairs):
    path = pairs / "train" / "web" / "00000.bin"
    content = bytearray(path.read_bytes())
    content[0:2] = (300).to_bytes(2, "little")
    path.write_bytes(content)
    assert "token-range" in {finding.code for finding in audit(pairs, tokenizer="byte").findings}


def test_pairs_need_a_tokenizer(pairs):
    assert EOS == 2
    with pytest.raises(ConfigError, match="does not name its tokenizer; name it with --tokenizer"):
        inspect(pairs)
