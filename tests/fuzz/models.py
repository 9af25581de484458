"""Models of one's own: a sound one, and ways in which somebody's first attempt goes wrong."""

from __future__ import annotations

import random

SOUND = """import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, vocab_size, context, width):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens, targets=None):
        x = self.embedding(tokens)
        x = x + torch.tanh(self.inner(x))
        logits = self.head(x)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten().long(), ignore_index=-1)
"""
BUILD, CALL, RETURN = "        super().__init__()\n", "        x = self.embedding(tokens)\n", "        return F.cross_entropy("
LOGITS = "        logits = self.head(x)\n"
# What stands in place of a line of it.
BROKEN = (
    (BUILD, "        pass\n"),
    (BUILD, BUILD + "        raise ValueError('no\\nsuch\\tthing')\n"),
    (BUILD, BUILD + "        raise SystemExit(0)\n"),
    (BUILD, BUILD + "        self.again = self\n"),
    (BUILD, BUILD + "        self.large = nn.Parameter(torch.empty(10**13))\n"),
    (BUILD, BUILD + "        self.none = nn.Parameter(torch.zeros(0))\n"),
    (BUILD, BUILD + "        self.unused = nn.Parameter(torch.zeros(3))\n"),
    (BUILD, BUILD + "        self.whole = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)\n"),
    (BUILD, BUILD + "        self.odd = nn.Parameter(torch.zeros(3, dtype=torch.complex64))\n"),
    (BUILD, BUILD + "        self.register_buffer('b', torch.zeros(2, dtype=torch.float64))\n"),
    (BUILD, BUILD + "        print('hello', flush=True)\n"),
    (BUILD, BUILD + "        setattr(self, 'a.b', 1)\n"),
    (CALL, CALL + "        raise RuntimeError('x' * 100000)\n"),
    (CALL, CALL + "        raise SystemExit(3)\n"),
    (CALL, CALL + "        return self.forward(tokens, targets)\n"),
    (CALL, CALL + "        x = x[:, ::2]\n"),
    (CALL, CALL + "        x = x + x.mean(1, keepdim=True)\n"),
    (CALL, CALL + "        x = x * float('nan')\n"),
    (CALL, CALL + "        x = x.double()\n"),
    (CALL, CALL + "        x = x.detach()\n"),
    (CALL, CALL + "        x = torch.empty(2**40)\n"),
    (CALL, CALL + "        assert False\n"),
    (CALL, CALL + "        import warnings; warnings.warn('careful')\n"),
    (LOGITS, "        logits = self.head(x)[..., :7]\n"),
    (LOGITS, "        logits = None\n"),
    (LOGITS, "        logits = [self.head(x)]\n"),
    (RETURN, "        return 0.5\n        return F.cross_entropy("),
    (RETURN, "        return logits\n        return F.cross_entropy("),
    (RETURN, "        return -F.cross_entropy("),
    (RETURN, "        return None, F.cross_entropy("),
    ("ignore_index=-1", "reduction='sum'"),
    ("ignore_index=-1", "ignore_index=-100"),
    ("vocab_size, context, width)", "vocab_size, context, width, depth)"),
    ("vocab_size, context, width)", "self, *arguments)"),
    ("vocab_size, context, width)", "**settings)"),
    ("class Model(nn.Module)", "class Model"),
    ("class Model(nn.Module)", "class Module(nn.Module)"),
    ("class Model", "raise SystemExit('no')\nclass Model"),
    ("class Model", "import nowhere_to_be_found\nclass Model"),
    ("import torch\n", "import torch\ntorch.set_default_dtype(torch.float64)\n"),
    ("import torch\n", "import torch\n1 / 0\n"),
    ("def forward", "def  forward("),
    ("def forward", "def backward"),
    (SOUND, ""),
    (SOUND, "Model = 3\n"),
    (SOUND, "def Model(**settings):\n    return 3\n"),
    (SOUND, "\x00"),
    (SOUND, "Model = " + "(" * 5000),
)


def own_model(draw: random.Random) -> str:
    """The text of a Python file."""
    if draw.random() < 0.1:
        return SOUND
    was, now = draw.choice(BROKEN)
    return SOUND.replace(was, now, 1)
