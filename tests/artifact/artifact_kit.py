"""A small model at rest, and artifacts of it."""

import torch

from ingot.artifact.container import write_artifact
from ingot.backends.torch.state import record

FACTS = {"config": {"model": {"family": "gpt2"}}, "tokenizer": {"kind": "char", "characters": "aä😀"}, "val_bpb": 1.5}
GENERATOR = torch.Generator().manual_seed(0)
MODEL = {
    "wte": torch.randn(33, 32, generator=GENERATOR),
    "half": torch.randn(3, generator=GENERATOR).bfloat16(),
    "q_gain": torch.randn(4, generator=GENERATOR),
    "steps": torch.tensor(7),
}


def records(model=MODEL):
    return [record(name, value) for name, value in model.items()]


def write(path, quantiser="none", codec="none", **how):
    return write_artifact(path, records(), FACTS, quantiser, codec, **how)
