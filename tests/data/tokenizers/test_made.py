"""Tokenizers that are learned from the text they are for: how much of it they see."""

from __future__ import annotations

import random

import pytest

from ingot.data.tokenizers import by_name as made

LEARNED = 100_001  # not a multiple of three, the bytes of a Chinese character


@pytest.fixture(autouse=True)
def learn_from_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "LEARNED_BYTES", LEARNED)


def chinese(end: str) -> str:
    """150 KB of lines of eight of 40 characters."""
    draw = random.Random(1)
    return "".join("".join(chr(0x4E00 + draw.randrange(40)) for _ in range(8)) + end for _ in range(6000))


@pytest.mark.parametrize("text", [chinese("\n"), chinese("\u3002"), "a b" + chinese("\u3002")], ids=["lines", "none", "early"])
def test_a_long_text_without_spaces_is_learned_from_like_any_other(text: str) -> None:
    tokenizer = made.learn_from("bpe:400", list, lambda: [text.encode()])
    assert tokenizer.vocab_size == 400
    assert tokenizer.encode("\u4e00\u4e01\u4e02\u4e03").size <= 4


@pytest.mark.parametrize("space", [" ", "\n"])
def test_a_long_text_is_cut_between_two_words(space: str) -> None:
    text = f"to be or not to be{space}".encode() * 9999
    text = text[: LEARNED - 99].rsplit(space.encode(), 1)[0] + space.encode() + b"z" * 999
    tokenizer = made.learn_from("bpe:300", list, lambda: [text])
    assert tokenizer.encode("zz").size == 2 and tokenizer.encode("not").size < 3
