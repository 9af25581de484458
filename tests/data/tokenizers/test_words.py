import io
import json
import lzma
import string
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tokenizers import (
    SPACE,
    added,
    byte_level_config,
    encode_documents,
    sentencepiece_file,
    shared,
    toy_hf,
    toy_sentencepiece,
)

from ingot.data.tokenizers import SentencePieceTokenizer, open_tokenizer
from ingot.data.tokenizers import word_table as words
from ingot.data.tokenizers.sentencepiece import word_starts
from ingot.data.tokenizers.word_table import WordTable
from ingot.errors import DataError

ENGLISH = "The cats' hats, on the mat (and 12 more) came-to see; what's the noise about? It is. " * 9
SPACES = " \n\t\r\x0b\x0c\x1c\x85\xa0\u1680\u2003\u2028\u202f\u205f\u3000"
ODD = "aZ09thecs.,-'\"<=_()\x00\x01\x7fé\u0301\u0338ﬁÅ\u200b\ufeff東\U0001f600"
characters = st.one_of(st.sampled_from(SPACES), st.sampled_from(ODD), st.characters(exclude_categories=["Cs"]))
texts = st.text(characters, max_size=60) | st.text(st.sampled_from(SPACES + ODD + " " * 8), max_size=60)


def trained(**settings):
    """A SentencePiece model that the library trained, in golf's way unless told otherwise."""
    import sentencepiece

    model = io.BytesIO()
    golf = {
        "model_type": "bpe", "byte_fallback": True, "split_digits": True, "add_dummy_prefix": False, "hard_vocab_limit": False,
        "normalization_rule_name": "nmt_nfkc", "vocab_size": 360, "minloglevel": 4, "required_chars": SPACE,
    }  # fmt: skip
    sentences = [ENGLISH[start : start + 80] for start in range(0, len(ENGLISH), 40)]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_writer=model, **golf | settings)
    return SentencePieceTokenizer(model.getvalue())


@cache
def made_once(tokenizer):
    return tokenizer()


@pytest.fixture(scope="module")
def tokenizers():
    """Those whose words are independent, each in its own way."""
    return {
        "byte-level": toy_hf(byte_level_config()),
        "golf": trained(),
        "space in front": trained(add_dummy_prefix=True),
        "lower case": trained(normalization_rule_name="nmt_nfkc_cf"),
        "no rules": trained(normalization_rule_name="identity"),
        "spaces kept": trained(normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=True),
        "unknown characters": trained(byte_fallback=False, character_coverage=0.98),
        "symbols": trained(user_defined_symbols=["<mask>", "the.", "\ue001"]),
        "numbers": trained(split_digits=False),
    }


def same(tokenizer, documents):
    """Whether the table gives documents the library's ids."""
    assert tokenizer._table is not None
    expected = [tokenizer.encode_document(text).tolist() for text in documents]
    return [ids.tolist() for ids in encode_documents(tokenizer, documents)] == expected


KINDS = [
    "byte-level", "golf", "space in front", "lower case", "no rules", "spaces kept", "unknown characters", "symbols",
    "numbers",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(documents=st.lists(texts, max_size=4))
def test_ids_are_the_librarys_for_any_text(tokenizers, kind, documents):
    assert same(tokenizers[kind], documents)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_librarys_wherever_two_characters_meet(tokenizers, kind):
    around = "aZ9.'<" + SPACES + "é\u0301\u0338\ue001"
    assert same(tokenizers[kind], [f"x{a}{b}the{b}{a} " for a in around for b in around])


@pytest.mark.parametrize("kind", ["byte-level", "golf", "spaces kept"])
@settings(max_examples=30)
@given(documents=st.lists(texts, min_size=1, max_size=4), size=st.integers(1, 40))
def test_long_documents_are_cut_where_words_begin(tokenizers, kind, documents, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "PORTION", size)
        assert same(tokenizers[kind], [*documents, "".join(documents) * 5])


@pytest.mark.parametrize(("name", "value"), [("MAX_WORDS", 5), ("MAX_IDS", 50)])
def test_a_full_table_is_emptied_and_goes_on(monkeypatch, name, value):
    tokenizer = toy_hf(byte_level_config())
    monkeypatch.setattr(words, name, value)
    monkeypatch.setattr(words, "PORTION", 100)
    assert same(tokenizer, [ENGLISH, "".join(f" {number}" for number in range(500)), ENGLISH])


def test_words_that_want_the_same_row_all_find_one(monkeypatch):
    monkeypatch.setattr(words, "ROW_BITS", 8)
    tokenizer = toy_hf(byte_level_config())
    assert same(tokenizer, ["".join(f" {number} {number}" for number in range(100, 300))] * 2)


def test_words_too_long_for_the_table_are_encoded_all_the_same(tokenizers):
    long = [" ".join("ab" * size for size in range(1, 30)), "ab" * 100_000, "東京" * 40_000 + " x", " " * 30_000 + "x"]
    assert same(tokenizers["byte-level"], long)
    assert same(tokenizers["golf"], [text[:60_000] for text in long])


def test_a_word_is_encoded_once():
    seen = []

    def encode(some, at_start):
        seen.extend(some)
        return [[len(word)] for word in some]

    table = WordTable(encode, lambda text: np.empty(0, np.uint16), b" ", b"'", b"!", np.dtype(np.uint16))
    for _ in range(2):
        found = table.encode_all([b"the cat's the cat's hat", b"the hat's"])
        assert [ids.tolist() for ids in found] == [[3, 4, 2, 4, 4, 2, 4], [3, 4, 2]]
    assert sorted(seen) == [b" cat", b" hat", b" the", b"'s", b"the"]


def test_a_table_survives_a_library_that_fails():
    failing = True

    def encode(some, at_start):
        if failing:
            raise DataError("no")
        return [[len(word)] for word in some]

    table = WordTable(encode, lambda text: np.empty(0, np.uint16), b" ", b"", b"!", np.dtype(np.uint16))
    with pytest.raises(DataError):
        table.encode_all([b"a bc"])
    failing = False
    assert table.encode_all([b"a bc"])[0].tolist() == [1, 3]


# What can be proved of a SentencePiece model


def starts(tokenizer):
    return word_starts(tokenizer.contents, tokenizer._model)


def test_golfs_words_begin_with_spaces_lines_and_marks(tokenizers):
    spaces, marks = starts(tokenizers["golf"])
    assert spaces == b" \n"
    assert set(b".,?)(-") <= set(marks)
    assert not set(b"<=>") & set(marks)  # an accent may follow, and make another character of them
    assert starts(tokenizers["spaces kept"])[0] == starts(tokenizers["no rules"])[0] == b" "


def test_a_mark_inside_a_piece_begins_no_word():
    tokenizer = trained(vocab_size=420, split_by_unicode_script=False)
    pieces = [tokenizer._model.id_to_piece(i) for i in range(260, tokenizer.vocab_size)]  # after the bytes
    joined = {b for piece in pieces for a, b in pairwise(piece) if a in string.ascii_letters and b in string.punctuation}
    assert joined
    assert not set("".join(joined).encode()) & set(starts(tokenizer)[1])
    assert same(tokenizer, [ENGLISH, "cats' mats, (hats). the.cats-to?"])


@pytest.mark.parametrize(
    "tokenizer",
    [
        lambda: trained(model_type="unigram", vocab_size=300),
        lambda: trained(split_by_whitespace=False, vocab_size=420),
        lambda: trained(user_defined_symbols=["the cat"]),
        lambda: trained(remove_extra_whitespaces=False),
        toy_sentencepiece,
        lambda: toy_sentencepiece([SPACE, "a", f"{SPACE}{SPACE}x"]),
    ],
    ids=["unigram", "words joined", "a symbol with a space", "rules that make runs of spaces", "toy", "two spaces"],
)
@settings(max_examples=20)
@given(documents=st.lists(texts, max_size=3))
def test_what_cannot_be_proved_is_left_to_the_library(tokenizer, documents):
    made = made_once(tokenizer)
    assert made._table is None
    expected = [made.encode_document(text).tolist() for text in documents]
    assert [ids.tolist() for ids in encode_documents(made, documents)] == expected


@pytest.mark.parametrize("rule", ["e\u0301\tE", "t h\tth", "a\n\tb", "x.\ty"])
def test_rules_that_are_not_the_librarys_may_reach_into_the_next_word(tmp_path, rule):
    key, value = rule.rsplit("\t", 1)
    line = " ".join(f"{ord(character):X}" for character in key) + "\t" + " ".join(f"{ord(character):X}" for character in value)
    (tmp_path / "rules.tsv").write_text(line + "\n")
    assert starts(trained(normalization_rule_name="", normalization_rule_tsv=str(tmp_path / "rules.tsv"))) is None


def test_two_spaces_in_a_piece_are_a_run_where_runs_are_kept():
    tokenizer = SentencePieceTokenizer(sentencepiece_file([SPACE, SPACE * 2, f"{SPACE}{SPACE}x", "x", "a"], fold=False))
    assert starts(tokenizer) is not None
    assert same(tokenizer, ["a  x   xx a", "  x ", "a ", " "])


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "NFC"}},
        {"added_tokens": [added(0, "<|endoftext|>"), added(260, "th", special=False)]},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}},
    ],
)
def test_a_byte_level_file_with_rules_of_its_own_is_left_to_the_library(changes):
    tokenizer = toy_hf(byte_level_config(**changes))
    text = "the th\u0301e"
    assert tokenizer._table is None
    assert encode_documents(tokenizer, [text])[0].tolist() == tokenizer.encode_document(text).tolist()


# Real models on real text


@pytest.mark.parametrize(
    "name", ["gpt2_bpe/hf_gpt2_tokenizer.json", *(f"tokenizers/fineweb_{size}_bpe.model" for size in (1024, 4096, 8192))]
)
def test_ids_of_real_text_are_the_librarys(name):
    tokenizer = open_tokenizer(str(shared(name)))
    with lzma.open(shared("corpus/val.jsonl.xz"), "rt") as lines:
        documents = [json.loads(line)["text"] for line, _ in zip(lines, range(100), strict=False)]
    assert same(tokenizer, documents)
