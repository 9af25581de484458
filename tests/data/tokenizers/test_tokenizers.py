import base64
import json
import lzma

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from toy_tokenizers import byte_level_config, llama_config, toy_hf, toy_sentencepiece, wordpiece_config

from ingot.data.tokenizers import ByteTokenizer, CharTokenizer, GPT2Tokenizer, NumberTokenizer, from_spec
from ingot.data.tokenizers.tokenizer_base import StreamDecoder
from ingot.errors import DataError

texts = st.text(st.characters(exclude_categories=["Cs"]))
GPT2 = GPT2Tokenizer()
FIXED = [
    ByteTokenizer(),
    GPT2,
    toy_sentencepiece(),
    toy_hf(byte_level_config()),
    toy_hf(llama_config()),
    toy_hf(wordpiece_config()),
]
AGAIN = [from_spec(json.loads(json.dumps(tokenizer.spec()))) for tokenizer in FIXED]
BOMB = base64.b64encode(lzma.compress(bytes((1 << 26) + 1), preset=0)).decode()
OF_FILES = [tokenizer for tokenizer in FIXED if "xz" in tokenizer.spec()]


def kinds(text):
    """One of each kind; the char tokenizer knows the text."""
    return [*FIXED, CharTokenizer(text + "a")]


# What every kind promises


@given(texts)
def test_a_lossless_tokenizer_gives_back_any_text_and_counts_its_utf8_bytes(text):
    for tokenizer in (tokenizer for tokenizer in kinds(text) if tokenizer.lossless):
        ids = tokenizer.encode_document(text).astype(np.int64)
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
        assert tokenizer.target_bytes(np.array([-1, *ids[:-1]])[: len(ids)], ids).sum() == len(text.encode())


@given(texts)
def test_a_spec_that_went_through_json_makes_a_tokenizer_that_gives_the_same_ids(text):
    char = CharTokenizer(text + "a")
    rebuilt = [*AGAIN, from_spec(json.loads(json.dumps(char.spec())))]
    for tokenizer, again in zip([*FIXED, char], rebuilt, strict=True):
        assert (again.kind, again.vocab_size, again.bos) == (tokenizer.kind, tokenizer.vocab_size, tokenizer.bos)
        assert again.fingerprint() == tokenizer.fingerprint()
        assert np.array_equal(again.encode(text), tokenizer.encode(text))


@given(texts)
@example(".:A")  # an unknown character inside a text: the space after it is text
@example(":A")  # and at its start: nothing comes before the word
def test_a_stream_of_single_tokens_gives_the_text_of_the_whole(text):
    for tokenizer in kinds(text):
        ids = tokenizer.encode_document(text)
        decoder = StreamDecoder(tokenizer, at_start=True)
        assert "".join(decoder.push([i]) for i in ids) + decoder.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", kinds("abc"), ids=lambda tokenizer: tokenizer.kind)
def test_arrays_of_any_shape_and_type_are_counted(tokenizer):
    ids = tokenizer.encode_document("a b a c a b"[:: 2 if tokenizer.kind == "char" else 1])
    for kind in (np.uint16, np.int32, np.int64):
        rows = np.stack([ids, ids]).astype(kind)
        counted = tokenizer.target_bytes(rows[:, :-1], rows[:, 1:])
        assert counted.shape == rows[:, 1:].shape
        assert counted.dtype == np.int32
        assert np.array_equal(counted[0], tokenizer.target_bytes(ids[:-1], ids[1:]))
    assert tokenizer.target_bytes([], []).shape == (0,)
    assert tokenizer.target_bytes([0, 0], [-1, tokenizer.vocab_size]).tolist() == [0, 0]


@pytest.mark.parametrize("tokenizer", kinds("abc"), ids=lambda tokenizer: tokenizer.kind)
def test_special_ids_are_those_that_stand_for_nothing(tokenizer):
    assert tokenizer.bos is None or tokenizer.is_special(tokenizer.bos)
    assert not tokenizer.is_special(int(tokenizer.encode("a")[-1]))
    assert tokenizer.is_special(-1)


def test_there_is_a_test_tokenizer_of_every_kind():
    with pytest.raises(DataError, match="unknown tokenizer kind") as unknown:
        from_spec({"kind": ""})
    known = str(unknown.value).partition("supports ")[2].split(", ")
    assert {tokenizer.kind for tokenizer in kinds("")} | {"number"} == set(known)  # which knows no other text than numbers


@given(st.lists(st.integers(0, 999)))
def test_numbers_come_back_and_stand_for_the_bytes_they_are_shown_with(ids):
    numbers = NumberTokenizer(1000)
    shown = numbers.decode(ids)
    assert shown == " ".join(map(str, ids))
    assert from_spec(numbers.spec()).encode(shown).tolist() == ids
    assert numbers.token_bytes()[ids].sum() == len(numbers.decode_bytes(ids))
    assert numbers.fingerprint() != NumberTokenizer(1001).fingerprint()


@pytest.mark.parametrize("text", ["1 two", "10", "-1", "1.5"])
def test_what_is_no_number_of_the_vocabulary_is_refused(text):
    with pytest.raises(DataError, match=r"is not an id; .* give numbers from 0 to 9"):
        NumberTokenizer(10).encode(text)


@pytest.mark.parametrize("size", [None, "9", 0, -1, (1 << 24) + 1])
def test_a_damaged_spec_of_numbers_is_refused(size):
    with pytest.raises(DataError, match=r"damaged tokenizer|must have 1 to"):
        from_spec({"kind": "number", "vocab_size": size})


def test_fingerprints_stay_what_they_are():
    assert ByteTokenizer().fingerprint() == "7da8b59d384076438bab9ae10dee36e1ed40155053c42c319918fb1eb47b641e"
    assert CharTokenizer("ab").fingerprint() == "d7c902bb1925eb660821e868465c60d50d753b749e136911ea074cabc8325000"
    assert GPT2.fingerprint() == "051a62319469004c82e975945f694075af606956a3dd29768e9c48ea9ea59e23"


@pytest.mark.parametrize("tokenizer", OF_FILES, ids=lambda tokenizer: tokenizer.kind)
@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: None,
        lambda packed: 7,
        lambda packed: "",
        lambda packed: "%%%",
        lambda packed: "é",
        lambda packed: packed[:-4],
        lambda packed: packed[:40],
        lambda packed: packed[:60] + ("A" if packed[60] != "A" else "B") + packed[61:],
        lambda packed: base64.b64encode(b"not xz").decode(),
        lambda packed: base64.b64encode(lzma.compress(b"")).decode(),
        lambda packed: base64.b64encode(lzma.compress(b"no tokenizer")).decode(),
        lambda packed: base64.b64encode(base64.b64decode(packed) + b"more").decode(),
        lambda packed: BOMB,
    ],
)
def test_a_damaged_or_hostile_file_in_a_spec_is_refused(tokenizer, damage):
    spec = tokenizer.spec()
    with pytest.raises(DataError, match=r"damaged") as caught:
        from_spec({**spec, "xz": damage(spec["xz"])})
    assert "\n" not in str(caught.value)


# Bytes and characters


def test_byte_ids_lie_behind_four_special_ids():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é").tolist() == [0xC3 + 4, 0xA9 + 4]
    assert tokenizer.encode("é").dtype == np.uint16
    assert (tokenizer.vocab_size, tokenizer.bos) == (260, 1)


def test_a_byte_document_begins_with_bos_and_a_char_document_does_not():
    assert ByteTokenizer().encode_document("a").tolist() == [1, ord("a") + 4]
    assert CharTokenizer("ab").encode_document("ba").tolist() == [1, 0]


def test_special_ids_are_skipped_and_have_no_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([1, ord("a") + 4, 0, 2, 3, ord("b") + 4]) == "ab"
    assert tokenizer.token_bytes().tolist() == [0] * 4 + [1] * 256


def test_bytes_that_are_not_utf8_become_replacement_characters():
    assert ByteTokenizer().decode([0xFF + 4, ord("a") + 4]) == "\ufffda"


def test_char_ids_are_positions_among_the_sorted_characters():
    tokenizer = CharTokenizer("hello\n")
    assert tokenizer.characters == "\nehlo"
    assert tokenizer.encode("hello\n").tolist() == [2, 1, 3, 3, 4, 0]


def test_fingerprints_differ_where_tokenizers_do():
    assert len({ByteTokenizer().fingerprint(), CharTokenizer("ab").fingerprint(), CharTokenizer("abc").fingerprint()}) == 3


def test_unknown_characters_are_listed_up_to_ten():
    with pytest.raises(DataError, match=r"'!', '0', .*'8' and 1 more; .*byte tokenizer") as caught:
        CharTokenizer("abc").encode("a0123456789b!")
    assert "'9'" not in str(caught.value)


def test_sixty_five_thousand_characters_fit_and_one_more_does_not():
    characters = [chr(i) for i in range(0x20000, 0x30001)]
    assert CharTokenizer(characters[:-1]).encode(characters[-2]).tolist() == [65535]
    with pytest.raises(DataError, match=r"65,537 .* at most 65,536; use the byte tokenizer"):
        CharTokenizer(characters)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("ab")])
@pytest.mark.parametrize("wrong", [-1, 260])
def test_ids_outside_the_vocabulary_are_named(tokenizer, wrong):
    with pytest.raises(DataError, match=f"token {wrong} is outside the {tokenizer.kind} vocabulary"):
        tokenizer.decode([0, wrong])


def test_half_a_surrogate_pair_is_refused_by_both():
    with pytest.raises(DataError, match=r"character 1 of the text is an unpaired surrogate"):
        ByteTokenizer().encode("a\ud800")
    with pytest.raises(DataError, match=r"not in the char vocabulary"):
        CharTokenizer("a").encode("a\ud800")


@pytest.mark.parametrize("spec", [{"kind": "char"}, {"kind": "char", "characters": 3}, {"kind": "char", "characters": "a\ud800"}])
def test_a_damaged_spec_is_refused(spec):
    with pytest.raises(DataError, match=r"damaged tokenizer"):
        from_spec(spec)


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(DataError, match=r"unknown tokenizer kind 'bpe'; .* byte, char, gpt2, sentencepiece, huggingface"):
        from_spec({"kind": "bpe"})
    with pytest.raises(DataError, match=r"unknown tokenizer kind \[\]"):
        from_spec({"kind": []})
