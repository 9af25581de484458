"""The Python side of every verb: train, load, generate, evaluate."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.artifact.weights import read_weights
from ingot.config.loading import load_config
from ingot.config.schema import Config
from ingot.data.samples import open_dataset
from ingot.data.tokenizers import StreamDecoder, Tokenizer, from_spec
from ingot.errors import CheckpointError, ConfigError, DataError
from ingot.eval.bits import Score, chosen_rows, score
from ingot.runs.checkpoints import find_checkpoint
from ingot.runs.report import Reporter
from ingot.train.session import MODEL_COPY, TrainingResult, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import nn


def train(
    config: str | Path | Config | dict[str, Any] | None = None,
    *,
    recipe: str | None = None,
    reporter: Reporter | None = None,
    **overrides: Any,
) -> TrainingResult:
    """Train as a YAML file, a recipe, a Config or a dict of sections says; overrides are sections: training={"max_steps": 10}."""
    if isinstance(config, Config):
        config = {name: getattr(config, name).model_dump() for name in type(config).model_fields}
    if isinstance(config, dict):
        merged = {name: {**config.get(name, {}), **overrides.get(name, {})} for name in config.keys() | overrides.keys()}
        return run(load_config(recipe=recipe, python=merged), reporter)
    return run(load_config(recipe=recipe, file=config, python=overrides), reporter)


@dataclass(frozen=True)
class LoadedModel:
    """A trained model ready to write or to be judged, with the tokenizer it was trained with."""

    model: nn.Module
    tokenizer: Tokenizer
    config: Config
    device: torch.device
    source: Path

    def stream(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 1337,
        use_cache: bool = True,
    ) -> Iterator[str]:
        """Yield the continuation of a prompt piece by piece."""
        import torch

        from ingot.generate.decode import Sampling, generate
        from ingot.train.trainer import prompt_ids

        if tokens < 0 or temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
            raise ConfigError("tokens, temperature and top_k must be 0 or more, and top_p above 0 and at most 1")
        start = torch.tensor([prompt_ids(self.tokenizer, prompt)], device=self.device)
        decoder = StreamDecoder(self.tokenizer)
        sampling = Sampling(temperature, top_k, top_p, seed)
        for token in islice(generate(self.model, start, sampling, self.tokenizer.vocab_size, use_cache), tokens):
            yield decoder.push(token.tolist())
        yield decoder.finish()

    def generate(self, prompt: str = "", **options: Any) -> str:
        """The prompt and its continuation; options as in `stream`."""
        return prompt + "".join(self.stream(prompt, **options))

    def evaluate(
        self, data: str | None = None, rows: int | None = None, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Score:
        """Loss and bits per byte on the validation split of `data`, or of what it was trained on."""
        import numpy as np
        import torch

        from ingot.runtime.device import DTYPES, pick_precision

        section = self.config.data
        dataset = open_dataset(data or section.path, None if data else section.tokenizer)
        if dataset.tokenizer.fingerprint() != self.tokenizer.fingerprint():
            raise DataError(f"{data or section.path} was prepared with another tokenizer than {self.source} was trained with")
        split = dataset.split("val")
        asked = self.config.training.precision
        precision = pick_precision("auto" if asked == "fp16" else asked, self.device)
        chosen = chosen_rows(split, self.config.stride, rows)
        done = 0

        @torch.no_grad()
        def nats(tokens: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]) -> float:
            nonlocal done
            x, y = (torch.from_numpy(array).to(self.device).long() for array in (tokens, targets))
            with torch.autocast(self.device.type, DTYPES[precision], enabled=precision != "fp32"):
                total = float(self.model(x, y)) * int(np.count_nonzero(targets >= 0))
            done += len(tokens)
            progress(done, len(chosen))
            return total

        size = self.config.evaluation.micro_batch
        return score(split, self.tokenizer.token_bytes(), section.seq_len, self.config.stride, chosen, size, nats)


def load(path: str | Path, *, which: str = "latest", device: str = "auto") -> LoadedModel:
    """Load a run folder (its latest or best checkpoint), one checkpoint, or an exported model.safetensors."""
    from ingot.backends.torch import build_model
    from ingot.backends.torch_state import load_model
    from ingot.runtime.device import pick_device

    path = Path(path)
    if path.is_file():
        weights = read_weights(path)
        tensors, facts, source = weights.tensors, weights.facts, path
    else:
        checkpoint = find_checkpoint(path, which)
        tensors, facts, source = checkpoint.tensors["model"], checkpoint.progress, checkpoint.path
    try:
        tokenizer, settings = from_spec(facts["tokenizer"]), facts["config"]
        if settings["model"]["family"] == "file":
            settings["model"]["file"] = str(_model_file(source, settings["model"]["file"]))
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{source} does not say how to build its model") from None
    config = load_config(python=settings, environment={}).config
    chosen = pick_device(device)
    model = build_model(config, tokenizer.vocab_size).to(chosen)
    load_model(model, tensors, str(source))
    return LoadedModel(model.eval(), tokenizer, config, chosen, source)


def _model_file(source: Path, told: str) -> Path:
    """The copy of a model of one's own that its run folder keeps, or the original."""
    kept = [folder / MODEL_COPY for folder in list(source.resolve().parents)[:2]]
    return next((file for file in kept if file.is_file()), Path(told))


def generate(path: str | Path, prompt: str = "", *, which: str = "latest", device: str = "auto", **options: Any) -> str:
    """Load a model and let it continue a prompt."""
    return load(path, which=which, device=device).generate(prompt, **options)
