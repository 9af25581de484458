"""Streaming decoder: bytes of an incomplete character are buffered until the rest arrives."""

from __future__ import annotations

import codecs

from ingot.data.tokenizers.tokenizer_base import Ids, Tokenizer


class StreamDecoder:
    """Decodes ids that arrive a few at a time; incomplete text, such as part of a character, is buffered until complete.

    `at_start`: no text precedes the first id, so the space that SentencePiece adds before the first word is dropped.
    """

    def __init__(self, tokenizer: Tokenizer, at_start: bool = False) -> None:
        self._tokenizer, self._at_start = tokenizer, at_start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[int] = []

    def push(self, ids: Ids) -> str:
        """Decode `ids` and return the text that is complete so far."""
        pending = [*self._held, *map(int, ids)]
        complete = len(pending) - self._tokenizer.unfinished(pending)
        self._held = pending[complete:]
        return self._decoder.decode(self._bytes(pending[:complete]))

    def finish(self) -> str:
        """Return the text that is still buffered, and reset the decoder for another text."""
        rest = self._decoder.decode(self._bytes(self._held), final=True)
        self._held = []
        self._decoder.reset()
        return rest

    def _bytes(self, ids: list[int]) -> bytes:
        data = self._tokenizer.decode_bytes(ids, self._at_start)
        self._at_start = self._tokenizer.at_start_after(ids, self._at_start) if ids else self._at_start
        return data
