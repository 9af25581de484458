import base64
import json
import lzma

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_tokenizers import SPACE, added, byte_level_config, encode_documents, llama_config, shared, toy_hf, wordpiece_config

from ingot.data.tokenizers import GPT2Tokenizer, from_spec, open_tokenizer
from ingot.data.tokenizers.hf_json import HFTokenizer
from ingot.data.tokenizers.tokenizer_base import StreamDecoder
from ingot.errors import DataError

texts = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("the cat\n  é")))
BYTE_LEVEL, LLAMA, WORDPIECE = toy_hf(byte_level_config()), toy_hf(llama_config()), toy_hf(wordpiece_config())
SPLITS = {"type": "Split", "pattern": {"Regex": "[0-9]"}, "behavior": "Isolated", "invert": False}
BYTE_STEP = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def document_bytes(tokenizer, text):
    ids = tokenizer.encode_document(text).astype(int)
    return int(tokenizer.target_bytes([-1, *ids[:-1]], ids).sum())


# Byte-level vocabularies


@given(texts)
def test_byte_level_text_comes_back_and_its_bytes_add_up(text):
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text
    assert document_bytes(BYTE_LEVEL, text) == len(text.encode())


def test_a_piece_is_the_bytes_its_characters_spell():
    ids = BYTE_LEVEL.encode(" thé")
    assert [BYTE_LEVEL.decode_bytes([i]) for i in ids] == [b" t", b"h", b"\xc3", b"\xa9"]
    assert BYTE_LEVEL.token_bytes()[ids].tolist() == [2, 1, 1, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLITS, BYTE_STEP]}},
        {"added_tokens": [added(0, "<|endoftext|>"), added(260, "<think>", special=False)]},
        {"truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}},
    ],
)
def test_what_keeps_all_text_is_lossless(changes):
    tokenizer = toy_hf(byte_level_config(**changes))
    text = "the <think> 1234 cat\n"
    assert tokenizer.lossless
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert document_bytes(tokenizer, text) == len(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {**BYTE_STEP, "add_prefix_space": True}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{**SPLITS, "behavior": "Removed"}, BYTE_STEP]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, BYTE_STEP]}},
        {"pre_tokenizer": None},
        {"added_tokens": [added(0, "<|endoftext|>"), added(260, "<think>", special=False, lstrip=True)]},
    ],
)
def test_what_may_change_text_is_not_called_lossless(changes):
    assert not toy_hf(byte_level_config(**changes)).lossless


def test_a_vocabulary_that_lacks_a_byte_is_not_called_lossless():
    config = byte_level_config()
    del config["model"]["vocab"]["Ā"]
    assert not toy_hf(config).lossless


def test_a_space_that_is_added_in_front_of_a_text_is_neither_shown_nor_counted():
    tokenizer = toy_hf(byte_level_config(pre_tokenizer={**BYTE_STEP, "add_prefix_space": True, "use_regex": True}))
    ids = tokenizer.encode("the the")
    assert [tokenizer.decode_bytes([i]) for i in ids] == [b" the", b" the"]
    assert tokenizer.decode(ids) == "the the"
    assert document_bytes(tokenizer, "the the") == 7


def test_special_tokens_in_a_text_are_plain_text():
    ids = BYTE_LEVEL.encode("<|endoftext|>")
    assert 0 not in ids
    assert BYTE_LEVEL.decode(ids) == "<|endoftext|>"


def test_dropout_of_merges_is_off():
    config = byte_level_config()
    config["model"]["dropout"] = 0.5
    tokenizer = toy_hf(config)
    assert len({tuple(tokenizer.encode(" the" * 20).tolist()) for _ in range(10)}) == 1


def test_gpt2s_own_file_gives_gpt2s_ids_and_bytes():
    tokenizer, gpt2 = open_tokenizer(str(shared("gpt2_bpe/hf_gpt2_tokenizer.json"))), GPT2Tokenizer()
    text = "It's 2026 — naïve café,\n\n   and\ttabs."
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.lossless) == (50257, 50256, True)
    assert tokenizer.encode_document(text).tolist() == gpt2.encode_document(text).tolist()
    assert np.array_equal(tokenizer.token_bytes(), gpt2.token_bytes())


# Vocabularies that write a space as U+2581


@given(texts)
def test_text_behind_an_added_space_comes_back_and_its_bytes_add_up(text):
    text = text.replace(SPACE, "")
    assert LLAMA.decode(LLAMA.encode(text)) == text
    assert document_bytes(LLAMA, text) == len(text.encode())


def test_every_space_of_a_piece_is_one_byte():
    two = LLAMA._tokenizer.token_to_id(SPACE * 2)
    assert LLAMA.token_bytes()[two] == 2
    assert LLAMA.target_bytes([LLAMA.bos], [two]).tolist() == [1]


def test_characters_it_does_not_know_are_bytes():
    ids = LLAMA.encode("é")
    assert LLAMA.target_bytes([LLAMA.bos, *ids[:-1]], ids).tolist() == [0, 1, 1]
    assert LLAMA.decode_bytes(ids) == " é".encode()


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_metaspace_is_read_whatever_it_adds(scheme):
    space = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": True}
    tokenizer = toy_hf(llama_config(normalizer=None, pre_tokenizer=space, decoder=space))
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    assert document_bytes(tokenizer, "the cat") == 7


def test_a_vocabulary_without_a_lone_space_is_refused():
    config = llama_config()
    config["model"] |= {"vocab": {t: i for t, i in config["model"]["vocab"].items() if SPACE not in t}, "merges": ["h e"]}
    with pytest.raises(DataError, match=r"no piece for a single space \(U\+2581\)"):
        toy_hf(config)


# Anything else


def test_words_are_what_decoding_them_behind_a_word_adds():
    ids = WORDPIECE.encode("The cats, a cat.")
    assert WORDPIECE.decode(ids) == "the cats, a cat."
    assert WORDPIECE.target_bytes([WORDPIECE.bos, *ids[:-1]], ids).tolist() == [3, 4, 1, 1, 2, 4, 1]
    decoder = StreamDecoder(WORDPIECE, at_start=True)
    assert "".join(decoder.push([i]) for i in ids) == "the cats, a cat."
    assert not WORDPIECE.lossless


def test_unknown_words_stand_for_nothing():
    assert WORDPIECE.token_bytes()[WORDPIECE.encode("dog")].tolist() == [0]


# The start of documents


@pytest.mark.parametrize(
    ("config", "bos"),
    [
        (byte_level_config(), 0),  # a usual name
        (llama_config(), 1),  # what the file puts in front
        (llama_config(post_processor=None), 1),
        (wordpiece_config(), 2),
        (byte_level_config(added_tokens=[added(0, "<|endoftext|>", special=False)]), None),
        (byte_level_config(added_tokens=[]), None),
    ],
)
def test_the_start_of_a_document_is_what_the_file_says_or_a_usual_name(config, bos):
    tokenizer = toy_hf(config)
    assert tokenizer.bos == bos
    assert tokenizer.encode_document("the").tolist() == ([] if bos is None else [bos]) + tokenizer.encode("the").tolist()


def test_the_start_of_a_document_can_be_named():
    assert toy_hf(llama_config(), "</s>").bos == 2
    assert toy_hf(llama_config(), "").bos is None
    with pytest.raises(DataError, match=r"'the' .*special tokens: <unk>, <s>, </s>"):
        toy_hf(llama_config(), "the")


# The file


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA, WORDPIECE, toy_hf(llama_config(), "")])
def test_the_spec_rebuilds_it_with_its_start(tokenizer):
    again = from_spec(json.loads(json.dumps(tokenizer.spec())))
    assert (again.contents, again.bos, again.lossless) == (tokenizer.contents, tokenizer.bos, tokenizer.lossless)
    assert again.fingerprint() == tokenizer.fingerprint()


def test_the_fingerprint_is_of_the_file_and_the_start():
    spec = {**LLAMA.spec(), "xz": base64.b64encode(lzma.compress(LLAMA.contents, preset=0)).decode()}
    assert from_spec(spec).fingerprint() == LLAMA.fingerprint()
    others = [toy_hf(llama_config(), "</s>"), toy_hf(llama_config(), ""), BYTE_LEVEL]
    assert len({LLAMA.fingerprint(), *(other.fingerprint() for other in others)}) == 4


def test_many_documents_are_encoded_as_one_by_one():
    documents = ["the cat " * number for number in range(40)]
    for one, many in zip(map(LLAMA.encode_document, documents), encode_documents(LLAMA, documents), strict=True):
        assert one.dtype == many.dtype == np.uint16
        assert np.array_equal(one, many)


def test_half_a_surrogate_pair_is_refused():
    for encode in (LLAMA.encode, lambda text: encode_documents(LLAMA, [text])):
        with pytest.raises(DataError, match=r"character 1 of the text is an unpaired surrogate"):
            encode("a\ud800")


def test_sixty_five_thousand_ids_have_16_bits_and_more_have_32():
    words = {f"word{i}": i for i in range(65_536)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "word0"}
    config = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "decoder": None, "model": model}
    narrow = toy_hf(config)
    assert (narrow.encode("word65535").tolist(), narrow.encode("word65535").dtype) == ([65_535], np.uint16)
    words["more"] = 65_536
    wide = toy_hf(config)
    assert (wide.encode("more word1").tolist(), wide.encode("more").dtype) == ([65_536, 1], np.uint32)
    ids, counts = wide.encode_batch([b"more", b"word2 more"])
    assert (ids.tolist(), counts.tolist(), ids.dtype) == ([65_536, 2, 65_536], [1, 2], np.uint32)
    assert wide.decode(ids[1:]) == "word2 more"


@pytest.mark.parametrize("contents", [b"", b"{}", b"[]", b"\xff", b'{"model": 3}', b"null", json.dumps(LLAMA.spec()).encode()])
def test_a_file_that_is_no_tokenizer_is_refused(contents):
    with pytest.raises(DataError, match=r"not a tokenizer.json, or it is damaged"):
        HFTokenizer(contents, None)


@pytest.mark.parametrize(
    "config",
    [
        llama_config(post_processor={**llama_config()["post_processor"], "special_tokens": {}}),  # the library panics
        byte_level_config(pre_tokenizer={**SPLITS, "pattern": {"Regex": "(("}}),
        byte_level_config(decoder={"type": "Unheard"}),
    ],
)
def test_a_file_with_a_damaged_part_is_refused_in_one_line(config):
    with pytest.raises(DataError, match=r"not a tokenizer.json, or it is damaged: ") as caught:
        toy_hf(config)
    assert "\n" not in str(caught.value)


def test_text_that_the_library_cannot_encode_is_one_line():
    config = wordpiece_config()
    del config["model"]["vocab"]["[UNK]"]
    config["added_tokens"] = []
    tokenizer = toy_hf(config)
    for encode in (tokenizer.encode, lambda text: encode_documents(tokenizer, [text])):
        with pytest.raises(DataError, match=r"the tokenizer cannot encode this text: .*UNK"):
            encode("dog")


def test_an_empty_vocabulary_is_refused():
    with pytest.raises(DataError, match=r"the vocabulary has 0 ids"):
        toy_hf({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}})


@pytest.mark.parametrize("bos", [3, 70_000, -1, "1", True, 1.0])
def test_a_spec_with_a_start_that_cannot_be_is_refused(bos):
    with pytest.raises(DataError, match=r"damaged tokenizer"):
        from_spec({**LLAMA.spec(), "bos": bos})


@pytest.mark.parametrize("pattern", [{"String": "\uffff"}, {"Regex": "\uffff"}])
def test_a_tokenizer_json_whose_replacements_lengthen_a_text_without_bound_is_refused(pattern):
    # They replace what no text has, so that the test ends where they are not refused.
    steps = [{"type": "Replace", "pattern": pattern, "content": "\uffff" * 10}] * 12
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": steps}]}
    with pytest.raises(DataError, match=r"Replace steps .* can make a text over 1,000 times longer"):
        toy_hf(byte_level_config(normalizer=normalizer))


def test_a_tokenizer_json_that_replaces_characters_by_a_few_others_is_read():
    pairs = [(chr(0x2150 + number), f"{number}...") for number in range(12)]
    steps = [{"type": "Replace", "pattern": {"String": old}, "content": new} for old, new in pairs]
    tokenizer = toy_hf(byte_level_config(normalizer={"type": "Sequence", "normalizers": steps}))
    assert tokenizer.decode(tokenizer.encode("the\u2151")) == "the1..."
