"""What an arm of the bench may set, and how it is written: `C:value_residual=true,seconds=300,seed=2`.

The defaults are model C, the small one for 16,000,000 bytes; A is the large one without a limit of size, C60 and A60 screen
candidates of both in a fifth of the time. Every candidate is one setting, off by default, so that an arm is a base and what it
changes.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Arm:
    """One training: its shape, what is switched on, how it learns and for how long."""

    # The run.
    seconds: float = 60.0  # of the training clock: compiling and evaluating are outside of it
    seed: int = 1
    score_rounded: bool = True  # also score the weights after rounding; only the small model has a limit of bytes

    # Shape.
    layers: int = 10
    width: int = 512
    head_size: int = 128
    kv_heads: int = 2
    mlp: float = 3.0  # hidden width over width
    activation: Literal["relu2", "leaky2", "swiglu"] = "relu2"
    tied: bool = True
    softcap: float = 15.0

    # Attention.
    pattern: str = "SSSSL"  # S: the last `window` tokens, L: all; repeated over the layers, the last layer is always long
    window: int = 256
    rope_base: float = 200_000.0
    rope_part: float = 1.0  # of each head's dimensions are rotated
    key_offset: bool = False  # long layers: the dimensions that are not rotated come from the token before
    qk_gain: float = 0.0  # learned per head, beginning here; 0: none
    head_gate: bool = True
    xsa: bool = False  # take out of each head's output what points along its own value
    value_residual: bool = False
    values: Literal["none", "projections", "tables"] = "projections"  # what alternate layers add to their values

    # Residual stream.
    skips: bool = False
    smear: bool = False
    backout: float = 0.0  # beginning of the learned part of the middle layer that is subtracted at the end; 0: none
    mix: float = 1.0  # beginning of lam in x <- lam x + mu x0
    dropout: float = 0.0  # of attention outputs

    # Data.
    tokens: int = 131_072  # per step
    rows: tuple[int, ...] = (2048,)  # row lengths, in equal parts of the time
    order: Literal["redrawn", "rows", "fixed"] = "redrawn"
    part: float = 1.0  # of the training documents, always the same ones

    # Optimizer.
    rate: float = 1.0  # factor on every rate
    muon_rate: float = 0.04
    embedding_rate: float = 0.9  # times sqrt(768 / width), as the head's and the tables'
    tied_rate: float = 0.02
    head_rate: float = 0.005
    gate_rate: float = 0.04
    decay: float = 0.2  # of matrices
    decay_schedule: Literal["falling", "constant", "rising"] = "falling"
    cautious: bool = True
    normuon: bool = True
    embedding_decay: float = 0.001
    head_decay: float = 0.01
    table_decay: float = 0.003
    momentum: float = 0.95
    momentum_start: float = 0.85
    momentum_steps: int = 200
    fall: float = 0.75  # last part of the time over which the rates fall
    floor: float = 0.05
    ema: tuple[float, ...] = (0.99, 0.995, 0.997)  # per step, all tracked at once
    ema_from: float = 0.5  # of the time
    ema_every: int = 4  # steps

    def __post_init__(self) -> None:
        longest = max(self.rows)
        if longest > 4096 or any(longest % length for length in self.rows):
            raise ValueError(f"rows={self.rows}: at most 4,096 tokens, and each length must divide the longest")
        if self.tokens % longest:
            raise ValueError(f"tokens={self.tokens} is not a multiple of {longest}, the longest row")
        if self.width % self.head_size or (self.width // self.head_size) % self.kv_heads:
            raise ValueError(f"width={self.width} does not divide into heads of {self.head_size} over kv_heads={self.kv_heads}")
        if self.key_offset and self.rope_part == 1.0:
            raise ValueError("key_offset shifts the dimensions that are not rotated; set rope_part below 1")
        if not 0.0 < self.part <= 1.0:
            raise ValueError(f"part={self.part} must be above 0 and at most 1")

    @property
    def heads(self) -> int:
        return self.width // self.head_size

    @property
    def hidden(self) -> int:
        """Width inside the MLP, a multiple of 64 where the model is wide enough for that to matter."""
        unit = 64 if self.width >= 256 else 1
        return max(unit, round(self.mlp * self.width / unit) * unit)


C = Arm(seconds=300.0)
A = replace(C, score_rounded=False, layers=9, width=640, kv_heads=5, mlp=4.0, tied=False, values="tables", head_gate=False)
# A fifth of the time has a fifth of the steps, and what is counted in steps goes with them.
SCREEN: dict[str, Any] = {"seconds": 60.0, "ema": (0.95, 0.98, 0.99), "momentum_steps": 60}
C60, A60 = replace(C, **SCREEN), replace(A, **SCREEN)
TOY = replace(
    C, seconds=3.0, layers=2, width=64, head_size=16, kv_heads=2, window=8, pattern="SL", tokens=512, rows=(64,), ema=(0.9, 0.95)
)
TOY_A = replace(TOY, score_rounded=False, kv_heads=4, mlp=4.0, tied=False, values="tables", head_gate=False)
BASES = {"C": C, "A": A, "C60": C60, "A60": A60, "toy": TOY, "toyA": TOY_A}


def parse_arm(text: str, **defaults: Any) -> Arm:
    """The arm that `base:key=value,key=value` names; `defaults` (seconds, seed) stand where it says nothing."""
    name, _, changes = text.strip().partition(":")
    if name not in BASES:
        raise ValueError(f"{text}: no base {name}; there are {', '.join(BASES)}")
    known = typing.get_type_hints(Arm)
    values = {key: value for key, value in defaults.items() if value is not None}
    for change in filter(None, changes.split(",")):
        key, _, word = change.partition("=")
        if key not in known:
            raise ValueError(f"{text}: no setting {key}; there are {', '.join(known)}")
        values[key] = _value(text, key, word, known[key])
    return dataclasses.replace(BASES[name], **values)


def _value(text: str, key: str, word: str, kind: Any) -> Any:
    """A word as the type of its setting; several numbers are joined by slashes."""
    if typing.get_origin(kind) is Literal:
        if word not in typing.get_args(kind):
            raise ValueError(f"{text}: {key} is one of {', '.join(typing.get_args(kind))}")
        return word
    try:
        if kind is bool:
            return {"true": True, "false": False}[word]
        if typing.get_origin(kind) is tuple:
            return tuple(typing.get_args(kind)[0](item) for item in word.split("/"))
        if kind is str:
            if not re.fullmatch("[SL]+", word):
                raise ValueError
            return word
        return kind(word.replace("_", ""))
    except (ValueError, KeyError):
        raise ValueError(f"{text}: {key}={word} is not a {getattr(kind, '__name__', kind)}") from None
