"""Tokenizers beside a model in Hugging Face's layout: a text has the same ids in transformers as here."""

import random

import pytest

from ingot.artifact.hf_tokenizer import find_tokenizer, tokenizer_files, tokenizer_json
from ingot.data.tokenizers import ByteTokenizer
from ingot.data.tokenizers.hf_json import from_json
from ingot.data.tokenizers.learn_vocabulary import learn
from ingot.data.tokenizers.plain import CharTokenizer, NumberTokenizer
from ingot.data.tokenizers.sentencepiece import SentencePieceTokenizer

transformers = pytest.importorskip("transformers")
ODD = [
    "größe 😀  3.14\n\n",
    " a",
    "  b  ",
    "ﬁ ½ \uff21",
    "\t x\u3000y",
    "é e\u0301",
    "中文字",
    "",
    "x\u2581 y",
    "①②",
    "\u00a0x",
    " \n ",
]


@pytest.fixture(scope="module")
def text():
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghiklmnoprstuvwyäöü", k=draw.randint(1, 8))) for _ in range(300)]
    return "".join(draw.choice(words) + draw.choice(["  ", " ", " ", ", ", ".\n", " 17 "]) for _ in range(6000))


KINDS = {
    "byte": lambda text: ByteTokenizer(),
    "char": lambda text: CharTokenizer(text),
    "sentencepiece": lambda text: SentencePieceTokenizer(learn("sentencepiece", [text], 600)),
    "space in front": lambda text: SentencePieceTokenizer(learn("sentencepiece", [text], 600, {"add_dummy_prefix": True})),
    "no bytes": lambda text: SentencePieceTokenizer(learn("sentencepiece", [text], 300, {"byte_fallback": False})),
    "unigram": lambda text: SentencePieceTokenizer(learn("sentencepiece", [text], 400, {"model_type": "unigram"})),
    "byte-level bpe": lambda text: from_json(learn("bpe", [text], 600)),
    "identity": lambda text: SentencePieceTokenizer(
        learn("sentencepiece", [text], 600, {"normalization_rule_name": "identity", "remove_extra_whitespaces": False})
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_texts_have_the_same_ids_in_transformers(tmp_path, text, kind):
    ours = KINDS[kind](text)
    for name, content in tokenizer_files(ours.spec(), 4096)[0].items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    draw = random.Random(1)
    places = [(draw.randrange(len(text)), draw.randrange(200)) for _ in range(1000)]
    texts = [text[at : at + size] for at, size in places] + [odd for odd in ODD if kind != "char"]
    wrong = [one for one in texts if theirs.encode(one, add_special_tokens=False) != ours.encode(one).tolist()]
    assert wrong == []
    start = [] if ours.bos is None else [ours.bos]
    assert theirs.encode("a") == start + ours.encode("a").tolist()
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos, ours.eos)
    assert theirs.decode(ours.encode("abc abc")) == "abc abc"
    assert find_tokenizer(tmp_path, ours.vocab_size).fingerprint() == ours.fingerprint()


def test_ids_that_stand_for_no_text_have_no_tokenizer_json():
    assert tokenizer_json(NumberTokenizer(7)) is None
