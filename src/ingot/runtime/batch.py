"""A batch of rows as numpy holds it: what data, evaluation and every backend agree upon."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IGNORED = -1  # a target that is not predicted; the same in model/layers.py, which imports nothing of ours
Batch = NDArray[np.int32]  # (rows, planes, seq_len): tokens, targets and, with a document mask, the document of each token
