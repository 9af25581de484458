"""Decode tokens that arrive one by one: bytes of an incomplete character are held back until the rest arrives."""

from __future__ import annotations

import codecs

from ingot.data.tokenizers.tokenizer_base import Ids, Tokenizer


class StreamDecoder:
    """A decoder of ids that arrive a few at a time; incomplete text, such as part of a character, is held back until complete.

    `at_start`: no text comes before the first id, so a space that only marks its word is not shown.
    """

    def __init__(self, tokenizer: Tokenizer, at_start: bool = False) -> None:
        self._tokenizer, self._at_start = tokenizer, at_start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[int] = []

    def push(self, ids: Ids) -> str:
        """Return the text that `ids` complete."""
        pending = [*self._held, *map(int, ids)]
        complete = len(pending) - self._tokenizer.unfinished(pending)
        self._held = pending[complete:]
        return self._decoder.decode(self._bytes(pending[:complete]))

    def finish(self) -> str:
        """Return the text that was still held back, and reset the decoder for another text."""
        rest = self._decoder.decode(self._bytes(self._held), final=True)
        self._held = []
        self._decoder.reset()
        return rest

    def _bytes(self, ids: list[int]) -> bytes:
        data = self._tokenizer.decode_bytes(ids, self._at_start)
        self._at_start = self._tokenizer.at_start_after(ids, self._at_start) if ids else self._at_start
        return data
