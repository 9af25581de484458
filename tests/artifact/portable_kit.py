"""What tests of other programs' files share: models of every family with random weights, gains and biases included."""

from itertools import product

import torch

from ingot.config.schema import FAMILIES
from ingot.model.registry import build

ROWS, CONTEXT = 260, 48  # ids of the byte tokenizer
SHAPE = {"layers": 2, "heads": 4, "width": 64, "context": CONTEXT, "vocab_size": ROWS}


def settings_of(family, **changes):
    """A whole section `model`."""
    return FAMILIES[family](**{**SHAPE, **changes}).model_dump()


def random_model(settings):
    torch.manual_seed(1)
    model = build(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tokens(rows=2, length=CONTEXT):
    return torch.randint(ROWS, (rows, length), generator=torch.Generator().manual_seed(2))


def relative_error(ours, theirs):
    return float((ours - theirs).abs().max() / ours.abs().max())


def crossed():
    """All options of llama that Hugging Face's layout has a place for, each with each."""
    flags, scalings = (False, True), ((None, 1.0), ("linear", 2.0), ("ntk", 2.0))
    for kv, qkv, out, mlp, act, tied, (scaling, factor) in product(
        (None, 2), flags, flags, flags, ("silu", "gelu", "relu"), flags, scalings
    ):
        names = {"kv_heads": kv, "qkv_bias": qkv, "attention_out_bias": out, "mlp_bias": mlp, "activation": act, "tied": tied}
        yield settings_of("llama", **names, rope_scaling=scaling, rope_factor=factor)
