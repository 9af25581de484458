"""The functions that nanoGPT's page documents, for notebooks and forks: get_batch, estimate_loss and get_lr, without a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ingot.backends.torch.collectives import Collectives
from ingot.backends.torch.device import torch_device
from ingot.backends.torch.inference import TorchInference, upload_planes
from ingot.backends.torch.state import load_model
from ingot.compat.nanogpt.command_line import Given
from ingot.compat.nanogpt.initial import Start, check_dataset, find_start
from ingot.compat.nanogpt.keys import PRECISIONS, TRAIN, defaults
from ingot.compat.nanogpt.model import GPT, GPTConfig
from ingot.compat.nanogpt.translate import (
    SEED,
    check_data,
    learning_rate,
    settle,
    settle_tokenizer,
    torch_device_named,
    translate,
)
from ingot.console.entry import warn
from ingot.data.loading.data_path import open_dataset
from ingot.data.loading.order import Random
from ingot.data.loading.rows import Windows
from ingot.errors import ConfigError, DataError
from ingot.eval.evaluator import Evaluator
from ingot.model.gpt2 import GPT2
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import Batch


class Session:
    """A model and its data as the keys of train.py say: `get_batch`, `estimate_loss` and `get_lr`, without a run.

    `Session({"dataset": "shakespeare_char", "device": "cpu"})` or `Session(dataset=..., device=...)`; keys that are left out have
    their defaults. `model` gives logits and a loss, `config` has every key, `iteration` is where a resumed run stands.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, **keys: Any) -> None:
        asked = {**(config or {}), **keys}
        if unknown := sorted(asked.keys() - TRAIN.keys()):
            raise ConfigError(f"unknown key {unknown[0]}; the keys are {', '.join(TRAIN)}")
        found = {name: TRAIN[name].of(value, "Session") for name, value in asked.items()}
        self.config: dict[str, Any] = settle(Given({**defaults(TRAIN), **found}, dict.fromkeys(found, "Session")), warn=warn)
        check_data(self.config)
        settle_tokenizer(self.config, warn)
        device = torch_device_named(self.config["device"], "a Session")
        self.device = torch_device(device)
        start = find_start({**self.config, "eval_only": True}, lambda line: None, warn)  # nothing is written
        self.config["block_size"] = start.args.block_size
        self.iteration = start.iteration
        self._resolved = translate(self.config, start.args, start.gelu).config
        data = self._resolved.data
        self._dataset = open_dataset(data.path, data.tokenizer, data.trust_tokens)
        check_dataset(self._dataset, self.config, start.args, warn)
        self.model = _build(start, self.device)
        forward = partial(GPT2.forward, self.model)  # nanoGPT's own returns logits and loss
        ids, precision = self.model.config.vocab_size, PRECISIONS[self.config["dtype"]]
        self._inference = TorchInference(self.model, ids, device, precision, Collectives(Ranks(), device), forward)
        self._drawn = {"train": 0, "val": 0}

    def get_batch(self, split: str) -> tuple[Tensor, Tensor]:
        """Tokens (batch_size, block_size) from random places of a split, and their targets, on the device.

        The batches of `train` are those of training, in its order.
        """
        if split not in self._drawn:
            raise ConfigError(f"there is no split {split!r}; the splits are train and val")
        tokens, rows, size = self._dataset.split(split), self.config["batch_size"], self.config["block_size"]
        if tokens.tokens <= size:
            raise DataError(f"{split}.bin has {tokens.tokens:,} tokens, too few for rows of block_size={size}")
        batch = np.empty((rows, 2, size), np.int32)
        first = self._drawn[split]
        Windows(tokens, Random(tokens.tokens, size, SEED), size).read(range(first, first + rows), range(rows), batch)
        self._drawn[split] += rows
        return self._upload(batch)

    def estimate_loss(self) -> dict[str, Tensor]:
        """The mean loss of eval_iters batches of each split, those that training reads at its evaluations."""

        def nats(batch: Batch) -> float:
            self._check(batch)
            return self._inference.score(batch)

        losses = {}
        for split in ("train", "val"):
            evaluator = Evaluator.of(self._resolved, self._dataset.split(split), self._dataset.tokenizer)
            losses[split] = torch.tensor(evaluator.score(evaluator.rows(self._resolved.evaluation.rows), nats).loss)
        return losses

    def _check(self, batch: Batch) -> None:
        if (largest := batch.max()) >= self.model.config.vocab_size:
            raise DataError(f"the data holds token {largest}, and the model has {self.model.config.vocab_size:,} ids")

    def _upload(self, batch: Batch) -> tuple[Tensor, Tensor]:
        self._check(batch)
        host = torch.from_numpy(batch)
        if self.device.type == "cuda":
            host = host.pin_memory()
        x, y = upload_planes(host, self.device)
        return x, y

    def get_lr(self, it: int) -> float:
        """The learning rate of an iteration: up in a line, down along a cosine; constant where decay_lr is False."""
        return learning_rate(self._resolved, it)


def _build(start: Start, device: torch.device) -> GPT:
    """The model of a start, with the weights that training would begin with."""
    torch.manual_seed(SEED)
    model = GPT(GPTConfig(**asdict(start.args)), start.gelu)
    if start.weights is not None:
        load_model(model, start.weights, "the checkpoint")
    return model.to(device)
