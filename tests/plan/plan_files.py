"""Files of a bucket: pairs of .bin and .idx with equal documents."""

import numpy as np

from ingot.data.formats.gpt_simple import index_bytes
from ingot.data.tokenizers import ByteTokenizer

TEXT = "some words that a model could learn by heart "


def write_pair(path, documents=20, text=TEXT):
    """A .bin and its .idx of so many equal documents; returns their tokens."""
    tokenizer = ByteTokenizer()
    one = [*tokenizer.encode(text).tolist(), tokenizer.eos]
    path.parent.mkdir(parents=True, exist_ok=True)
    np.array(one * documents, "<u2").tofile(path)
    offsets = [len(one) * number for number in range(documents + 1)]
    path.with_suffix(".idx").write_bytes(index_bytes(offsets, [0] * documents, 2))
    return offsets[-1]
