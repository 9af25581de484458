"""A small trained model of the byte tokenizer, as an artifact; its weights are random, its texts are not."""

import torch

from ingot.api import load
from ingot.artifact.container import write_artifact
from ingot.backends.torch.state import model_records
from ingot.data.tokenizers import ByteTokenizer
from ingot.inference.model import foreign_weights
from ingot.model.registry import build

SETTINGS = {"family": "llama", "layers": 1, "heads": 2, "width": 32, "context": 64, "vocab_size": 260}


def write_small_model(path, scale=0.3, **settings):
    torch.manual_seed(0)
    settings = SETTINGS | settings
    model = build(settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    weights = foreign_weights(path, model_records(model), settings, ByteTokenizer())
    write_artifact(path, weights.tensors.values(), weights.facts, "none", "none")
    return load(path, device="cpu")
