"""In place of ingot.data.tokenizers.open: SentencePiece models, from a file or a spec."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.data.tokenizers.base import Tokenizer, unpack
from ingot.data.tokenizers.sentencepiece import SentencePieceTokenizer
from ingot.errors import DataError


def from_spec(spec: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that gave `spec`."""
    if spec.get("kind") != "sentencepiece":
        raise DataError(f"the data was made with a tokenizer of the kind {spec.get('kind')} and golf needs SentencePiece")
    return SentencePieceTokenizer(unpack(spec))


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a file."""
    try:
        return SentencePieceTokenizer(Path(name).read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror}") from None
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
