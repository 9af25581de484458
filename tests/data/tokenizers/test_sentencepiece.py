import base64
import hashlib
import itertools
import json
import lzma
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_tokenizers import (
    SPACE,
    UNUSED,
    USER_DEFINED,
    WORDS,
    encode_documents,
    piece_id,
    sentencepiece_file,
    shared,
    toy_sentencepiece,
)

from ingot.data.tokenizers import SentencePieceTokenizer, from_spec, open_tokenizer
from ingot.data.tokenizers.learn_vocabulary import train_tokenizer
from ingot.data.tokenizers.tokenizer_base import StreamDecoder
from ingot.errors import DataError
from ingot.eval.evaluator import Score

GOLDEN = json.loads((Path(__file__).parents[2] / "golden/golden.json").read_text())["golf_bytes"]
ENGLISH = "The cats sat on the mat, and 12 more came to see what the noise was about. " * 9
texts = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("aeiou thn\n\t 12\u2581\u3000ﬁ")))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that the library trained, in the way golf's were."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "text.txt").write_text(ENGLISH)
    return train_tokenizer([folder / "text.txt"], folder / "toy.model", "sentencepiece", 320)


def sizes(tokenizer, *pieces):
    """The bytes of pieces, each after the one before it; the first is only looked back at."""
    ids = np.array([piece_id(tokenizer, piece) for piece in pieces])
    return tokenizer.target_bytes(ids[:-1], ids[1:]).tolist()


# The rule


def test_golfs_example_counts_ten_bytes():
    found = sizes(toy_sentencepiece(), "<s>", f"{SPACE}The", f"{SPACE}cat", "s", "<0x0A>", "<s>", f"{SPACE}A")
    assert found == [3, 4, 1, 1, 0, 1]
    assert sum(found) == 10


def test_a_lone_space_is_one_byte_except_at_the_start_of_a_document():
    assert sizes(toy_sentencepiece(), "s", SPACE, SPACE) == [1, 1]
    assert sizes(toy_sentencepiece(), "<s>", SPACE, "s") == [0, 1]


def test_only_the_first_space_of_a_piece_is_one_byte():
    tokenizer = toy_sentencepiece()
    assert sizes(tokenizer, "s", f"{SPACE}{SPACE}x") == [5]
    assert sizes(tokenizer, "<s>", f"{SPACE}{SPACE}x") == [4]
    assert sizes(tokenizer, "s", f"a{SPACE}b") == [5]


@pytest.mark.parametrize("outside", [-1, 274, 70000])
def test_an_id_outside_the_vocabulary_has_no_bytes_and_starts_a_document(outside):
    tokenizer = toy_sentencepiece()
    cat = piece_id(tokenizer, f"{SPACE}cat")
    assert tokenizer.vocab_size == 274
    assert tokenizer.target_bytes([cat, outside], [outside, cat]).tolist() == [0, 3]


@pytest.mark.parametrize("boundary", ["<pad>", "<s>", "</s>", "<unk>", "hole"])
def test_control_unknown_and_unused_ids_have_no_bytes_and_start_a_document(boundary):
    tokenizer = toy_sentencepiece([*WORDS, ("hole", UNUSED)])
    assert sizes(tokenizer, "s", boundary, f"{SPACE}cat") == [0, 3]


def test_a_piece_of_a_byte_is_one_byte_even_where_the_byte_is_a_space():
    assert sizes(toy_sentencepiece(), "<s>", "<0x20>", "<0xFF>", f"{SPACE}A") == [1, 1, 2]


def test_a_symbol_of_the_users_counts_like_any_piece():
    assert sizes(toy_sentencepiece([*WORDS, ("<é>", USER_DEFINED)]), "s", "<é>", "<é>") == [4, 4]


def test_rows_are_counted_like_a_stream():
    tokenizer = toy_sentencepiece()
    ids = np.array([1, *(piece_id(tokenizer, f"{SPACE}{word}") for word in ("The", "cat", "A"))], np.uint16)
    rows = np.stack([ids, ids])
    assert tokenizer.target_bytes(rows[:, :-1], rows[:, 1:]).tolist() == [[3, 4, 2]] * 2
    assert tokenizer.target_bytes(rows[:, :-1], rows[:, 1:]).dtype == np.int32


def test_a_uniform_predictor_needs_ten_bits_for_a_token_of_1024():
    tokens, size = 62_021_632, 151_080_363  # the challenge's own validation text
    score = Score(tokens * math.log(1024), tokens, size, float(size), "pieces")
    assert round(score.loss, 6) == 6.931472
    assert round(score.bits_per_byte, 4) == 4.1052


@pytest.mark.parametrize("word", ["", f"a{SPACE}"])
def test_a_model_whose_bytes_would_be_counted_wrong_is_refused(word):
    words = [f"{SPACE}The", "s"] if not word else [SPACE, word, f"b{SPACE}"]
    with pytest.raises(DataError, match=r"byte counts would be wrong"):
        toy_sentencepiece(words)


# Text


@given(text=texts)
def test_decoding_gives_the_models_own_normalised_text(trained, text):
    ids = trained.encode(text)
    assert trained.decode(ids) == trained._model.decode(ids.tolist()) == trained._model.normalize(text).replace(SPACE, " ")


@given(text=texts)
def test_the_bytes_of_a_document_are_those_of_its_normalised_text(trained, text):
    ids = trained.encode_document(text)
    assert ids[0] == trained.bos == 1
    found = trained.target_bytes(ids[:-1], ids[1:])
    starts_with_space = trained.decode(ids).startswith(" ")  # only a U+2581 in the text itself can
    assert found.sum() == len(trained.decode(ids).encode()) - starts_with_space


@given(text=texts, dummy_prefix=st.booleans())
def test_the_space_a_model_adds_is_taken_away_again_and_no_other(text, dummy_prefix):
    tokenizer = toy_sentencepiece(dummy_prefix=dummy_prefix, fold=False)
    expected = text.replace(SPACE, " ")  # all that such a model cannot tell apart
    assert tokenizer.decode(tokenizer.encode(text)) == expected
    assert tokenizer.decode(tokenizer.encode_document(text)) == expected


def test_what_nothing_stands_for_is_not_decoded():
    tokenizer = toy_sentencepiece()
    cat = piece_id(tokenizer, f"{SPACE}cat")
    assert tokenizer.decode([1, 3, cat, 2, 0, cat]) == " cat cat"


def test_a_stream_keeps_spaces_between_words_and_drops_the_one_that_a_model_adds():
    tokenizer = toy_sentencepiece(dummy_prefix=True)
    the, cat, bos = piece_id(tokenizer, f"{SPACE}The"), piece_id(tokenizer, f"{SPACE}cat"), 1
    stream = [the, cat, bos, the, cat]
    fresh, continued = StreamDecoder(tokenizer, at_start=True), StreamDecoder(tokenizer)
    assert "".join(fresh.push([i]) for i in stream) == "The catThe cat" == tokenizer.decode(stream)
    assert "".join(continued.push([i]) for i in stream) == " The catThe cat"
    assert fresh.push([]) == ""


def test_many_documents_are_encoded_as_one_by_one(trained):
    documents = [ENGLISH[start : start + 40] for start in range(0, 300, 7)]
    for one, many in zip(map(trained.encode_document, documents), encode_documents(trained, documents), strict=True):
        assert one.dtype == many.dtype == np.uint16
        assert np.array_equal(one, many)


def test_half_a_surrogate_pair_is_refused(trained):
    for encode in (trained.encode, lambda text: encode_documents(trained, [text])):
        with pytest.raises(DataError, match=r"character 1 of the text is an unpaired surrogate"):
            encode("a\ud800")


def test_a_model_without_a_start_gives_documents_none():
    tokenizer = toy_sentencepiece(start="<start>")
    assert tokenizer.bos is None
    assert tokenizer.encode_document("s").tolist() == [piece_id(tokenizer, "s")]


# The file


def test_the_spec_holds_the_file_and_the_fingerprint_is_of_the_file():
    contents = sentencepiece_file()
    tokenizer = SentencePieceTokenizer(contents)
    spec = json.loads(json.dumps(tokenizer.spec()))
    assert from_spec(spec).contents == contents
    repacked = {**spec, "xz": base64.b64encode(lzma.compress(contents, preset=0)).decode()}
    assert repacked["xz"] != spec["xz"]
    assert from_spec(repacked).fingerprint() == tokenizer.fingerprint()
    assert toy_sentencepiece(WORDS[:-1]).fingerprint() != tokenizer.fingerprint()


def test_the_fingerprint_never_changes():
    digest = {"kind": "sentencepiece", "sha256": hashlib.sha256(sentencepiece_file()).hexdigest(), "bos": 1}
    text = json.dumps(digest, sort_keys=True, separators=(",", ":"))
    assert toy_sentencepiece().fingerprint() == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("contents", [b"", b"abc", bytes(100), sentencepiece_file()[:-1], b"<html>not found</html>"])
def test_a_file_that_is_no_model_is_refused(contents):
    with pytest.raises(DataError, match=r"not a SentencePiece model, or it is damaged"):
        SentencePieceTokenizer(contents)


# The challenge's own model on real text


@pytest.fixture(scope="module")
def real():
    return open_tokenizer(str(shared("tokenizers/fineweb_1024_bpe.model")))


@pytest.fixture(scope="module")
def documents():
    with lzma.open(shared("corpus/val.jsonl.xz"), "rt") as lines:
        return [json.loads(line)["text"] for line in lines]


def test_golfs_counts_on_real_text_are_reproduced_exactly(real, documents):
    encoded = encode_documents(real, documents)
    ids = np.concatenate(encoded)
    counted = real.target_bytes(ids[:-1], ids[1:])
    assert (len(documents), len(ids), int(counted.sum())) == (2_347, 4_439_497, 10_548_009)
    assert sum(len(text.encode()) for text in documents) == 10_573_424
    first = slice(0, sum(map(len, encoded[:400])))
    assert len(ids[first]) == GOLDEN["tokens"]
    assert int(counted[: first.stop - 1].sum()) == GOLDEN["bytes_by_the_golf_rule"]
    assert sum(len(text.encode()) for text in itertools.islice(documents, 400)) == GOLDEN["utf8_bytes_of_the_texts"]
    assert ids[:33].tolist() == GOLDEN["first_33_ids"]
    assert counted[:32].tolist() == GOLDEN["first_32_target_bytes"]


def test_the_challenges_model_has_golfs_layout(real):
    assert (real.vocab_size, real.bos, real.lossless) == (1024, 1, False)
    assert [piece_id(real, piece) for piece in ("<pad>", "<s>", "</s>", "<unk>", "<0x00>", SPACE)] == [0, 1, 2, 3, 4, 939]
