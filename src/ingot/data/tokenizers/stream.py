"""Text that arrives token by token."""

from __future__ import annotations

import codecs

from ingot.data.tokenizers.base import Ids, Tokenizer


class StreamDecoder:
    """Text of ids that arrive a few at a time; what is unfinished, such as a part of a character, is held back until it is whole.

    `at_start`: no text comes before the first id, so that a space which only marks its word is not shown.
    """

    def __init__(self, tokenizer: Tokenizer, at_start: bool = False) -> None:
        self._tokenizer, self._at_start = tokenizer, at_start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[int] = []

    def push(self, ids: Ids) -> str:
        """The text that `ids` complete."""
        known = [*self._held, *map(int, ids)]
        whole = len(known) - self._tokenizer.unfinished(known)
        self._held = known[whole:]
        return self._decoder.decode(self._bytes(known[:whole]))

    def finish(self) -> str:
        """What was still held back; the decoder is then ready for another text."""
        rest = self._decoder.decode(self._bytes(self._held), final=True)
        self._held = []
        self._decoder.reset()
        return rest

    def _bytes(self, ids: list[int]) -> bytes:
        data = self._tokenizer.decode_bytes(ids, self._at_start)
        self._at_start = self._tokenizer.at_start_after(ids, self._at_start) if ids else self._at_start
        return data
