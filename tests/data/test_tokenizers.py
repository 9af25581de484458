import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.data.tokenizers import ByteTokenizer, CharTokenizer, StreamDecoder, from_spec
from ingot.errors import DataError

texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(texts)
def test_bytes_give_back_any_text(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(texts)
def test_characters_give_back_any_text(text):
    tokenizer = CharTokenizer(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(texts)
def test_both_tokenizers_count_the_utf8_bytes_of_the_text(text):
    for tokenizer in (ByteTokenizer(), CharTokenizer(text)):
        assert tokenizer.token_bytes()[tokenizer.encode_document(text)].sum() == len(text.encode())


@given(texts)
def test_a_spec_that_went_through_json_makes_the_same_tokenizer(text):
    for tokenizer in (ByteTokenizer(), CharTokenizer(text + "a")):
        again = from_spec(json.loads(json.dumps(tokenizer.spec())))
        assert again.fingerprint() == tokenizer.fingerprint()
        assert (again.kind, again.vocab_size, again.bos) == (tokenizer.kind, tokenizer.vocab_size, tokenizer.bos)


@given(texts, st.data())
def test_a_stream_of_single_tokens_gives_the_same_text(text, data):
    tokenizer = data.draw(st.sampled_from([ByteTokenizer(), CharTokenizer(text)]))
    decoder = StreamDecoder(tokenizer)
    assert "".join(decoder.push([i]) for i in tokenizer.encode(text)) + decoder.finish() == text


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
    with pytest.raises(DataError, match=r"65,537 distinct characters .* at most 65,536; use the byte tokenizer"):
        CharTokenizer(characters)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("ab")])
@pytest.mark.parametrize("wrong", [-1, 260])
def test_ids_outside_the_vocabulary_are_named(tokenizer, wrong):
    with pytest.raises(DataError, match=f"token {wrong} is outside the {tokenizer.kind} vocabulary"):
        tokenizer.decode([0, wrong])


def test_half_a_surrogate_pair_is_refused_by_both():
    with pytest.raises(DataError, match=r"character 1 of the text is half a surrogate pair"):
        ByteTokenizer().encode("a\ud800")
    with pytest.raises(DataError, match=r"not in the char vocabulary"):
        CharTokenizer("a").encode("a\ud800")


@pytest.mark.parametrize("spec", [{"kind": "char"}, {"kind": "char", "characters": 3}, {"kind": "char", "characters": "a\ud800"}])
def test_a_damaged_spec_is_refused(spec):
    with pytest.raises(DataError, match=r"damaged tokenizer"):
        from_spec(spec)


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(DataError, match=r"unknown tokenizer kind 'bpe'; .* byte, char"):
        from_spec({"kind": "bpe"})
