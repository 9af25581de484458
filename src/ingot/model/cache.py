"""What a layer of attention keeps of the tokens before, so that a text is written a token at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class LayerCache:
    """The keys and values one attention layer has seen: two buffers, filled from the left, twice as long when they are full.

    With a `place` (1), or one per row (B), on the device, one token is put there and the whole buffers are given back: nothing
    about such a step depends on the host, so it can be recorded once and replayed. `attention_mask` then tells the filled part
    from the rest.
    """

    place: Tensor | None = None

    def __init__(self, batch: int, heads: int, capacity: int, head_size: int, device: torch.device, dtype: torch.dtype):
        self.capacity, self.length = capacity, 0
        # Not empty: a masked value is multiplied by 0, and 0 times a nan that the memory held by chance is nan.
        self.keys = torch.zeros(batch, heads, min(capacity, 128), head_size, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, H, T, D) keys and values and return all that are held so far."""
        if self.place is not None:
            for kept, new in ((self.keys, k), (self.values, v)):
                if len(self.place) == 1:
                    kept.index_copy_(2, self.place, new.to(kept.dtype))
                else:
                    kept.scatter_(2, self.place[:, None, None, None].expand_as(new), new.to(kept.dtype))
            return self.keys, self.values
        end = self.length + k.size(2)
        self.reserve(end)
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reserve(self, length: int) -> None:
        """Make room for so many tokens."""
        if length > self.keys.size(2):
            more = min(max(length, 2 * self.keys.size(2)), self.capacity) - self.keys.size(2)
            self.keys, self.values = (F.pad(kept, (0, 0, 0, more)) for kept in (self.keys, self.values))
