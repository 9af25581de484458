"""The Python side of every verb: train, load, generate, evaluate."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.artifact.container import read_artifact
from ingot.config.loading import load_config
from ingot.config.schema import Config
from ingot.data.loading.open import open_dataset
from ingot.data.tokenizers import StreamDecoder, Tokenizer, from_spec, open_tokenizer
from ingot.errors import CheckpointError, ConfigError, DataError
from ingot.eval.evaluator import Judge, Score
from ingot.runs.checkpoints import find_checkpoint
from ingot.runs.report import Reporter
from ingot.runtime.batch import IGNORED, Batch
from ingot.train.start import MODEL_COPY, TrainingResult, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

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
    names_data: bool = True  # whether it knows a text that it was trained on

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
        """The continuation of a prompt, piece by piece; a prompt or setting that cannot be used is told at once."""
        import torch

        from ingot.generate.sampling import Sampling, prompt_ids
        from ingot.generate.torch.decode import generate

        if tokens < 0 or temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
            raise ConfigError("tokens, temperature and top_k must be 0 or more, and top_p above 0 and at most 1")
        start = torch.tensor([prompt_ids(self.tokenizer, prompt)], device=self.device)
        sampling = Sampling(temperature, top_k, top_p, seed)

        def pieces() -> Iterator[str]:
            decoder = StreamDecoder(self.tokenizer, at_start=not prompt)
            written = generate(self.model, start, sampling, self.tokenizer.vocab_size, use_cache, record=True)
            for token in islice(written, tokens):
                yield decoder.push(token.tolist())
            yield decoder.finish()

        return pieces()

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
        if data is None and not self.names_data:
            raise ConfigError(f"{self.source} was not trained here and names no text; say what to score it on with --data DIR")
        dataset = open_dataset(data or section.path, None if data else section.tokenizer, section.trust_tokens)
        if dataset.tokenizer.fingerprint() != self.tokenizer.fingerprint():
            raise DataError(f"{data or section.path} was prepared with another tokenizer than {self.source} was trained with")
        judge = Judge.of(self.config, dataset.split("val"), self.tokenizer)
        asked = self.config.training.precision
        precision = pick_precision("auto" if asked == "fp16" else asked, self.device)
        chosen = judge.rows(rows)
        done = 0

        @torch.no_grad()
        def nats(batch: Batch) -> float:
            nonlocal done
            with torch.autocast(self.device.type, DTYPES[precision], enabled=precision != "fp32"):
                loss = float(self.model(*torch.from_numpy(batch).to(self.device).long().unbind(1)))
            done += len(batch)
            progress(done, len(chosen))
            return loss * int(np.count_nonzero(batch[:, 1] != IGNORED))

        return judge.score(chosen, nats)


def load(
    path: str | Path, *, which: str = "latest", device: str = "auto", tokenizer: str | None = None, data: str | None = None
) -> LoadedModel:
    """Load a run folder (its latest or best checkpoint), one checkpoint, or an artifact.

    An artifact that was exported without its tokenizer takes it from `tokenizer`, a name or file, or from the folder `data`.
    """
    import torch

    from ingot.backends.torch.build import build_model
    from ingot.backends.torch.state import check_fits, load_model
    from ingot.runtime.device import pick_device

    path = Path(path)
    if path.is_file():
        artifact = read_artifact(path)
        tensors, facts, source = artifact.tensors, artifact.facts, path
    else:
        checkpoint = find_checkpoint(path, which)
        tensors, facts, source = checkpoint.weights, checkpoint.progress, checkpoint.path
    try:
        settings, spec = facts["config"], facts["tokenizer"]
        if not isinstance(spec, dict | None):
            raise TypeError
        if settings["model"]["family"] == "file":
            settings["model"]["file"] = str(model_file(source, facts))
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{source} does not say how to build its model") from None
    config = load_config(python=settings, environment={}).config
    ids = _tokenizer(source, config, facts, tokenizer, data)
    chosen = pick_device(device)
    if config.model.family != "file":
        # Before memory is taken: settings that a stranger wrote may ask for any size.
        if config.model.layers > len(tensors):
            raise CheckpointError(f"{source} has fewer tensors than model.layers={config.model.layers:,} needs; it is damaged")
        with torch.device("meta"):
            check_fits(build_model(config, ids.vocab_size), tensors, str(source))
    model = build_model(config, ids.vocab_size).to(chosen)
    load_model(model, tensors, str(source))
    return LoadedModel(model.eval(), ids, config, chosen, source, facts.get("data_fingerprint") is not None)


def _tokenizer(source: Path, config: Config, facts: Mapping[str, Any], name: str | None, data: str | None) -> Tokenizer:
    """The tokenizer that came with a model; of one that came without, the one that is named or that of the data."""
    own = from_spec(facts["tokenizer"]) if facts["tokenizer"] is not None else None
    if own is not None and name is None:
        return own
    try:
        section = config.data
        opened = None if name else open_dataset(data or section.path, section.tokenizer, section.trust_tokens)
        found = opened.tokenizer if opened else open_tokenizer(str(name))
    except DataError as error:
        raise CheckpointError(f"{source} was exported without its tokenizer, and it is not found: {error}") from None
    if found.fingerprint() != (own.fingerprint() if own is not None else facts.get("tokenizer_fingerprint")):
        was = "has its tokenizer" if own is not None else "was exported without its tokenizer"
        raise CheckpointError(f"{source} {was}, and {name or data or config.data.path} is or has another")
    return found


def model_file(source: Path, facts: Mapping[str, Any]) -> Path:
    """The Python file of a model of one's own: the copy in its run folder or beside an artifact, unchanged.

    A file may come from anybody, so an artifact never says which code on this machine is run.
    """
    folder = source.resolve().parent
    kept = [folder / MODEL_COPY, *([folder.parent / MODEL_COPY] if folder.name in ("artifact", "checkpoints") else [])]
    file = next((file for file in kept if file.is_file()), None)
    if file is None:
        raise CheckpointError(f"{source} holds a model of its own; put its Python file beside it as {MODEL_COPY}")
    if hashlib.sha256(file.read_bytes()).hexdigest() != facts.get("model_file_sha256"):
        raise CheckpointError(f"{file} is not the file that {source} was trained with; put that one there")
    return file


def generate(path: str | Path, prompt: str = "", *, which: str = "latest", device: str = "auto", **options: Any) -> str:
    """Load a model and let it continue a prompt."""
    return load(path, which=which, device=device).generate(prompt, **options)
