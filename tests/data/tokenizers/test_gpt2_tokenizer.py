import hashlib
import json
import lzma
import shutil
import socket
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from toy_tokenizers import encode_documents, shared

from ingot.data.tokenizers import GPT2Tokenizer, open_tokenizer
from ingot.data.tokenizers.tokenizer_base import byte_alphabet
from ingot.errors import DataError

texts = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("aeiou thn\n\t 12'sé\u3000\x1c")))


@pytest.fixture(scope="module")
def gpt2():
    return GPT2Tokenizer()


@pytest.fixture(scope="module")
def library():
    """The same vocabulary as a Hugging Face tokenizer reads it, the mark of a document being plain text as in ours."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(shared("gpt2_bpe/hf_gpt2_tokenizer.json")))
    tokenizer.encode_special_tokens = True
    return tokenizer


def test_the_ranks_are_those_that_were_published():
    packed = (files("ingot.data.tokenizers") / "gpt2.tiktoken.xz").read_bytes()
    sha256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
    assert hashlib.sha256(lzma.decompress(packed)).hexdigest() == sha256
    assert sha256 in (files("ingot.data.tokenizers") / "ATTRIBUTION.md").read_text()


def test_it_needs_no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert GPT2Tokenizer().encode("hello").tolist() == [31373]


def test_ids_are_gpt2s(gpt2):
    assert (gpt2.vocab_size, gpt2.bos, gpt2.lossless) == (50257, 50256, True)
    assert gpt2.encode("Hello, I'm a language model,").tolist() == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert gpt2.encode_document("Hello").tolist() == [50256, 15496]


@given(text=texts)
@example(text="<|endoftext|>")
def test_ids_are_those_of_the_hugging_face_file(gpt2, library, text):
    assert gpt2.encode(text).tolist() == library.encode(text).ids


def test_the_mark_of_a_document_is_plain_text_inside_one(gpt2):
    ids = gpt2.encode("<|endoftext|>")
    assert 50256 not in ids
    assert gpt2.decode(ids) == "<|endoftext|>"
    assert gpt2.decode([50256, *ids, 50256]) == "<|endoftext|>"


@pytest.mark.parametrize(("white", "after"), [(" ", ""), (" ", "a"), ("\n", "\x1c")])
def test_white_space_without_end_is_encoded_as_always(gpt2, white, after):
    text = f"x{white * 1_200_000}{after}"
    ids = gpt2.encode(text)
    assert gpt2.decode(ids) == text
    short = gpt2.encode(f"x{white * 1000}{after}")  # few enough for the library to take in one
    assert ids[-1] == short[-1]
    assert ids[0] == short[0]


@given(st.integers(9_990, 10_010), st.sampled_from(" \n"), st.sampled_from(["", "a", " a", "1"]))
def test_runs_that_are_cut_give_the_ids_of_runs_that_are_not(gpt2, length, white, after):
    text = f"so {white * length}{after}"
    assert gpt2.encode(text).tolist() == gpt2._encoding.encode_ordinary(text)


def test_many_documents_are_encoded_as_one_by_one(gpt2):
    documents = [f"document {number}\n" * number for number in range(40)]
    for one, many in zip(map(gpt2.encode_document, documents), encode_documents(gpt2, documents), strict=True):
        assert np.array_equal(one, many)


def test_the_users_own_files_of_the_same_vocabulary_are_accepted(gpt2, tmp_path):
    assert open_tokenizer(str(shared("gpt2_bpe"))).fingerprint() == gpt2.fingerprint()
    shutil.copy(shared("gpt2_bpe/encoder.json"), tmp_path / "vocab.json")
    shutil.copy(shared("gpt2_bpe/vocab.bpe"), tmp_path / "merges.txt")
    assert open_tokenizer(str(tmp_path)).fingerprint() == gpt2.fingerprint()


def write_merges(folder, change=lambda ids, merges: None):
    """encoder.json and vocab.bpe from the ranks of the package."""
    ranks = GPT2Tokenizer()._pieces[:-1]
    character = {byte: c for c, byte in byte_alphabet().items()}
    ids = {"".join(character[byte] for byte in piece): i for i, piece in enumerate(ranks)}
    merges = [f"{token[:1]} {token[1:]}" for token in list(ids)[256:]]
    ids["<|endoftext|>"] = 50256
    change(ids, merges)
    (folder / "encoder.json").write_text(json.dumps(ids))
    (folder / "vocab.bpe").write_text("\n".join(["#version: 0.2", *merges, ""]))
    return str(folder)


def test_encoder_and_merges_are_read_without_the_ranks(gpt2, tmp_path):
    assert open_tokenizer(write_merges(tmp_path)).fingerprint() == gpt2.fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        lambda ids, merges: ids.update({"he": 0, "!": 258}),
        lambda ids, merges: merges.pop(),
        lambda ids, merges: ids.clear(),
    ],
)
def test_another_vocabulary_is_refused_and_never_taken_for_gpt2s(tmp_path, change):
    with pytest.raises(DataError, match=r"encoder.json: .* not GPT-2's; .*give a tokenizer.json"):
        open_tokenizer(write_merges(tmp_path, change))


@pytest.mark.parametrize("contents", ["{", "[]", '{"\u4e00": 3}', '{"a": null}'])
def test_a_damaged_vocabulary_is_refused(tmp_path, contents):
    (tmp_path / "encoder.json").write_text(contents)
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")
    with pytest.raises(DataError, match=r"encoder.json: "):
        open_tokenizer(str(tmp_path))


def test_a_vocabulary_without_its_merges_is_refused(tmp_path):
    (tmp_path / "encoder.json").write_text("{}")
    with pytest.raises(DataError, match=r"encoder.json: cannot read vocab.bpe: No such file"):
        open_tokenizer(str(tmp_path))
