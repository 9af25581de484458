"""Open trained models, generate text with them and score them, for the commands and for the Python API."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ingot.artifact.container import read_artifact
from ingot.artifact.gpt_simple import MODEL, WEIGHTS, is_checkpoint, read_model, saved_checkpoints, tokenizer_folder
from ingot.artifact.hf_tokenizer import assumed_tokenizer
from ingot.artifact.hf_tokenizer import find_tokenizer as find_hf_tokenizer
from ingot.backends.base import Inference
from ingot.backends.open import open_inference, read_torch_weights
from ingot.backends.sampling import DTYPES, MOST_TOKENS, GenerationOptions, Sampling, is_whole, prompt_ids
from ingot.config.loading import load_config
from ingot.config.schema import Config
from ingot.data.loading.data_path import open_dataset, resolve
from ingot.data.prepare.cached import PREFIX
from ingot.data.store.dataset import NoTokenizer
from ingot.data.store.documents import ends_of
from ingot.data.tokenizers import Tokenizer, from_spec, open_tokenizer
from ingot.data.tokenizers.tokenizer_base import StreamDecoder
from ingot.errors import CheckpointError, ConfigError, DataError, RunError
from ingot.eval.evaluator import Evaluator, Score, evaluator_of
from ingot.eval.self_test import Check, self_test
from ingot.runs.checkpoints import Checkpoint, find_checkpoint, load_checkpoint, locate_checkpoint, read_index
from ingot.runs.folder import INDEX, MODEL_COPY, saved_steps
from ingot.runtime.files import file_sha256
from ingot.runtime.tensors import TensorRecord

# A model before loading: the weights of a run, a checkpoint, an artifact or another program's file, and the metadata to build it.

# Names of the checkpoint metadata entries that exported files also contain.
FACTS = ("config", "tokenizer", "tokenizer_fingerprint", "vocab_size", "data_fingerprint", "model_file_sha256", "step", "val_bpb")


@dataclass(frozen=True)
class Weights:
    """A model's weights and the metadata needed to open or export it; `run` is the model's run folder, if known."""

    path: Path
    run: Path | None
    tensors: dict[str, TensorRecord]
    facts: dict[str, Any]
    config: Config

    @property
    def names_data(self) -> bool:
        """Return True if the file records which data the model was trained on."""
        return self.facts.get("data_fingerprint") is not None


def open_weights(path: Path, which: str = "latest") -> Weights:
    """Read the weights of a run folder (latest or best checkpoint), a single checkpoint, an artifact, or a gpt-simple folder."""
    if path.is_file():
        artifact = read_artifact(path)
        return Weights(path, None, artifact.tensors, *_known(path, artifact.facts))
    if (theirs := _locate_gpt_simple(path, which)) is not None:
        settings, records = read_model(theirs), read_torch_weights(theirs / MODEL / WEIGHTS).values()
        folder = tokenizer_folder(theirs)
        tokenizer = find_hf_tokenizer(folder, settings["vocab_size"]) if folder is not None else None
        try:
            weights = foreign_weights(theirs, records, settings, tokenizer, None if folder is None else str(folder))
        except ConfigError as error:
            raise CheckpointError(f"{theirs / MODEL} has no valid settings for building its model: {error}") from None
        # Accept any tokenizer: the tokenizer saved with the model has a padding token that the data's tokenizer lacks.
        return replace(weights, run=theirs.parent.parent, facts={**weights.facts, "tokenizer_fingerprint": None})
    checkpoint = find_checkpoint(path, which)
    run = checkpoint.path.parent.parent if checkpoint.path.parent.name == "checkpoints" else None
    known = dict(checkpoint.progress)
    if (known.get("val_step"), known.get("val_whole")) != (checkpoint.step, True):
        known["val_bpb"] = None  # the score belongs to an earlier step or covers only a part of the validation split
    return Weights(checkpoint.path, run, checkpoint.weights, *_known(checkpoint.path, known))


def locate_weights(path: Path) -> Path:
    """Return the artifact or checkpoint that a path refers to, without reading its weights."""
    if path.is_file():
        return path.resolve()
    if (theirs := _locate_gpt_simple(path, "latest")) is not None:
        if not (theirs / MODEL / WEIGHTS).is_file():
            raise CheckpointError(f"{theirs} has no {MODEL}/{WEIGHTS}")
        read_model(theirs)
        return theirs.resolve()
    checkpoint_path = locate_checkpoint(path)
    for file, file_record in read_index(checkpoint_path)["files"].items():
        if not (checkpoint_path / file).is_file() or (checkpoint_path / file).stat().st_size != file_record["bytes"]:
            raise CheckpointError(f"{checkpoint_path / file} is missing or its size is not {file_record['bytes']:,} bytes")
    return checkpoint_path.resolve()


def _known(path: Path, progress: Mapping[str, Any]) -> tuple[dict[str, Any], Config]:
    """Return the metadata and the config of a model file; raise CheckpointError if either is missing or invalid."""
    facts: dict[str, Any] = {name: progress.get(name) for name in FACTS}
    try:
        if not facts["config"]["model"]["family"] or not isinstance(progress["tokenizer"], dict | None):
            raise TypeError
        return facts, load_config(python=facts["config"], environment={}).config
    except (KeyError, TypeError, ConfigError) as error:
        reason = f": {error}" if isinstance(error, ConfigError) else ""
        raise CheckpointError(f"{path} has no valid settings for building its model{reason}") from None


def scoring_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's scoring settings, which exported files keep so that the same weights get the same score everywhere."""
    length, evaluation = config.get("data", {}).get("seq_len"), config.get("evaluation", {})
    scoring = {"seq_len": length, "stride": evaluation.get("stride") or length, "bytes": evaluation.get("bytes")}
    return {name: value for name, value in scoring.items() if value is not None}


def foreign_weights(
    path: Path,
    records: Iterable[TensorRecord],
    settings: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    named: str | None = None,
    scoring: Mapping[str, Any] = MappingProxyType({}),
) -> Weights:
    """Return the Weights of a model that another program saved, with a complete config built from the model's `settings`.

    `named` is the name or path of the model's tokenizer. `scoring` holds the scoring settings stored in the file, if any.
    """
    length = scoring.get("seq_len") or settings["context"]
    named = tokenizer.kind if tokenizer is not None and tokenizer.kind in ("byte", "gpt2") else named
    tree = {
        "model": dict(settings),
        "data": {"seq_len": length, "tokenizer": named},
        "training": {"max_steps": 0, "tokens_per_step": length},
        "evaluation": {name: scoring[name] for name in ("stride", "bytes", "whole_rows") if name in scoring},
    }
    config = load_config(python=tree, environment={}).config
    facts: dict[str, Any] = dict.fromkeys(FACTS)
    facts["config"] = config.model_dump(mode="json")
    if tokenizer is not None:
        facts |= {"tokenizer": tokenizer.spec(), "tokenizer_fingerprint": tokenizer.fingerprint()}
        facts["vocab_size"] = tokenizer.vocab_size
    return Weights(path, None, {record.name: record for record in records}, facts, config)


def _locate_gpt_simple(path: Path, which: str) -> Path | None:
    """Return the gpt-simple checkpoint at a path; None if there is none or if an Ingot checkpoint there is at least as recent."""
    if is_checkpoint(path):
        return path
    if which != "latest" or not (found := saved_checkpoints(path)):
        return None
    return found[-1].path if found[-1].step > max(saved_steps(path / "checkpoints"), default=-1) else None


def as_checkpoint(weights: Weights) -> Checkpoint:
    """Return the model as a checkpoint, with its optimizer state; artifacts and models of other programs have only weights."""
    if (weights.path / INDEX).is_file():
        return load_checkpoint(weights.path)
    progress = {"tokens": 0, "elapsed_seconds": 0.0, **weights.facts}
    return Checkpoint(weights.path, int(weights.facts["step"] or 0), progress, {"model": weights.tensors})


def model_file(weights: Weights) -> Path:
    """Return the Python file of a custom model: the unmodified copy in its run folder or next to the artifact.

    An artifact may come from an untrusted source, so it must not select which code on this machine runs.
    """
    folder = weights.path.resolve().parent
    kept = [folder / MODEL_COPY, *([folder.parent / MODEL_COPY] if folder.name in ("artifact", "checkpoints") else [])]
    file = next((file for file in kept if file.is_file()), None)
    if file is None:
        raise CheckpointError(f"{weights.path} contains a custom model; put its Python file next to it as {MODEL_COPY}")
    if file_sha256(file) != weights.facts.get("model_file_sha256"):
        raise CheckpointError(f"{file} is not the file that {weights.path} was trained with; replace it with the original")
    return file


AT_ONCE = 64  # maximum batch size of completions: larger batches slow down each step without raising throughput
LONGEST_ROW = 1 << 20  # longest row, in tokens, on which a model with rotary embeddings can be evaluated
BATCH_TOKENS = 1 << 16  # maximum tokens of a batch, prompts included; limits the KV cache


@dataclass(frozen=True, repr=False)
class LoadedModel:
    """A trained model, ready for generation or evaluation, with the tokenizer it was trained with."""

    weights: Weights  # metadata of the model; the backend holds the tensors
    tokenizer: Tokenizer
    backend: Inference

    def __repr__(self) -> str:
        family, step = self.weights.config.model.family, self.weights.facts.get("step")
        trained = f", step {step:,}" if isinstance(step, int) else ""
        sized = f"{family}, {self.backend.parameters:,} parameters{trained}"
        return f"LoadedModel({self.weights.path}: {sized}, {self.tokenizer.kind} tokenizer, on {self.backend.device.name})"

    def stream(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        temperature: float = Sampling.temperature,
        top_k: int | None = Sampling.top_k,
        top_p: float | None = Sampling.top_p,
        seed: int | None = Sampling.seed,
        use_cache: bool = Sampling.use_cache,
        repetition_penalty: float = Sampling.repetition_penalty,
        stop_at_end: bool = False,
    ) -> Iterator[str]:
        """Yield the completion of a prompt as it is generated; an invalid prompt or setting raises an error at once."""
        if not is_whole(tokens) or not 0 <= tokens <= MOST_TOKENS:
            raise ConfigError(f"tokens must be a whole number from 0 to {MOST_TOKENS:,}, not {tokens!r}")
        options = GenerationOptions(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop_at_end=stop_at_end,
            use_cache=use_cache,
        )
        ids, sampling = self._ids([prompt], options), options.sampling(1)
        return (piece for _, piece in self._write([prompt], ids, sampling, tokens, stop_at_end))

    def generate(self, prompt: str = "", **options: Any) -> str:
        """Return the prompt and its completion; the options are those of `stream`."""
        return prompt + "".join(self.stream(prompt, **options))

    # Show the options in help() and in the auto-completion of notebooks.
    generate.__signature__ = inspect.signature(stream).replace(return_annotation="str")  # type: ignore[attr-defined]

    def generate_batch(
        self, prompts: Sequence[str], options: GenerationOptions | None = None, seeds: Sequence[int] | None = None
    ) -> list[str]:
        """Return the completion of each prompt; prompt i is sampled with seeds[i] (default: options.seed + i)."""
        options = options or GenerationOptions()
        ids, sampling = self._ids(prompts, options), options.sampling(len(prompts))
        seeds = sampling.seeds if seeds is None else seeds
        order = sorted(range(len(prompts)), key=lambda i: len(ids[i]))  # batch prompts of similar length
        texts, at_once = {}, AT_ONCE
        while order:
            longest = len(ids[order[min(at_once, len(order)) - 1]]) + options.max_new_tokens
            part = order[: max(1, min(at_once, BATCH_TOKENS // longest))]
            seeded = replace(sampling, seeds=tuple(seeds[i] for i in part))
            batch = [prompts[i] for i in part], [ids[i] for i in part]
            try:
                pieces = list(self._write(*batch, seeded, options.max_new_tokens, options.stop_at_end))
            except MemoryError:
                if len(part) == 1:
                    message = "a single completion does not fit into the device's memory; shorten it or use another device"
                    raise RunError(message) from None
                at_once = len(part) // 2
                continue
            order = order[len(part) :]
            for row, i in enumerate(part):
                written = "".join(piece for number, piece in pieces if number == row)
                texts[i] = prompts[i] + written if options.return_full_text else written
        return [texts[i] for i in range(len(prompts))]

    def stream_batch(self, prompts: Sequence[str], options: GenerationOptions | None = None) -> Iterator[tuple[int, str]]:
        """Complete all prompts in one batch; yield (prompt index, new text) as text is generated."""
        options = options or GenerationOptions()
        ids, sampling = self._ids(prompts, options), options.sampling(len(prompts))
        return self._write(prompts, ids, sampling, options.max_new_tokens, options.stop_at_end) if prompts else iter(())

    def _ids(self, prompts: Sequence[str], options: GenerationOptions) -> list[list[int]]:
        return [prompt_ids(self.tokenizer, prompt, options.start_mark) for prompt in prompts]

    def _write(
        self, prompts: Sequence[str], ids: list[list[int]], sampling: Sampling, tokens: int, stop_at_end: bool
    ) -> Iterator[tuple[int, str]]:
        """Yield (prompt index, new text) until all completions end; `ids` are the tokenized prompts."""
        ends = self.ends if stop_at_end else set()
        decoders = {row: StreamDecoder(self.tokenizer, at_start=not prompt) for row, prompt in enumerate(prompts)}
        for step in islice(self.backend.generate(ids, sampling), tokens):
            for row, decoder in list(decoders.items()):
                ended = step[row] in ends
                if piece := decoder.finish() if ended else decoder.push([step[row]]):
                    yield row, piece
                if ended:
                    del decoders[row]
            if not decoders:
                return
        for row, decoder in decoders.items():
            if piece := decoder.finish():
                yield row, piece

    @property
    def context(self) -> int:
        """Return the largest number of tokens the model attends to at once."""
        return self.weights.config.model.context or self.weights.config.data.seq_len

    @property
    def ends(self) -> set[int]:
        """Return the ids that end a document: the end-of-document token and the start token of the next document."""
        return set(ends_of(self.tokenizer))

    def cast(self, dtype: str) -> LoadedModel:
        """Cast the weights to `dtype`; after that, the model can only be used for generation."""
        if dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {dtype}; choose from {', '.join(DTYPES)}")
        if not self.backend.cast(DTYPES[dtype]):
            reason = "custom models cannot be cast, and mlx does not support fp16; leave dtype out"
            raise ConfigError(f"{self.weights.path} cannot be opened with dtype {dtype}: {reason}")
        return self

    def evaluate(
        self,
        data: str | None = None,
        rows: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        *,
        stride: int | None = None,
        seq_len: int | None = None,
    ) -> Score:
        """Return the loss and bits per byte on the validation split of `data` (default: the data the model was trained on).

        Row length and stride default to those of the training config; with `seq_len` but no `stride`, rows do not overlap.
        """
        evaluator = self._evaluator(data, stride, seq_len)
        return evaluator.score(evaluator.rows(rows), self.backend.score, progress=progress)

    def self_test(self, data: str | None = None, *, stride: int | None = None, seq_len: int | None = None) -> list[Check]:
        """Check that `evaluate` scores every token once, that no prediction sees the future, and that probabilities sum to 1."""
        vocab_size, backend = self.tokenizer.vocab_size, self.backend
        evaluator, head_rows = self._evaluator(data, stride, seq_len), self.weights.config.model.vocab_size or vocab_size
        return self_test(evaluator, backend.score, backend.score_rows, vocab_size, head_rows, backend.precision)

    def _evaluator(self, data: str | None, stride: int | None, seq_len: int | None) -> Evaluator:
        """Build the evaluator for the validation split of `data` (default: the data the model was trained on)."""
        config, path = self.scored_by(stride, seq_len), self.weights.path
        choose = "choose the text to score it on with --data DIR"
        if data is None and not self.weights.names_data:
            raise ConfigError(f"{path} does not name its training data; {choose}")
        named = config.data.path
        if data is None and not named.startswith(PREFIX) and not resolve(named).exists():
            raise DataError(f"{path} was trained on {named}, which is not on this machine; {choose}")
        where, tokenizer = data or named, None if data else config.data.tokenizer
        try:
            dataset = open_dataset(where, tokenizer, config.data.trust_tokens)
        except NoTokenizer:  # data that does not name a tokenizer is assumed to use the model's tokenizer
            if config.data.tokenizer is None:
                raise
            dataset = open_dataset(where, config.data.tokenizer, config.data.trust_tokens)
        if data is None and named.startswith(PREFIX) and dataset.fingerprint != self.weights.facts["data_fingerprint"]:
            version = f"another version of {named}, with different validation texts"
            raise DataError(f"{path} was trained on {version}; --data {named} scores it anyway, perhaps on training text")
        own, theirs = self.tokenizer, dataset.tokenizer
        same = own.fingerprint() == theirs.fingerprint()
        if not same and self.weights.facts.get("tokenizer_fingerprint") is None:  # another program may have added a padding token
            shared = range(min(own.vocab_size, theirs.vocab_size))
            same = all(own.decode_bytes([i]) == theirs.decode_bytes([i]) for i in shared)
        if not same:
            prepared = f"{data or config.data.path} was prepared with a different tokenizer than {path} was trained with"
            raise DataError(f"{prepared}; prepare the text with the model's tokenizer")
        return evaluator_of(config, dataset, "val")

    def scored_by(self, stride: int | None = None, seq_len: int | None = None) -> Config:
        """Return the config that `evaluate` uses; raise ConfigError if the row length or the stride is invalid."""
        config = self.weights.config
        if seq_len is not None:
            most = config.model.context or config.data.seq_len
            if config.model.family not in ("gpt2", "file"):  # gpt2 and custom models may have learned positional embeddings
                most = max(most, LONGEST_ROW)
            if not 1 <= seq_len <= most:
                where = f"{self.weights.path} supports row lengths from 1 to {most:,} tokens"
                raise ConfigError(f"{where}, not {seq_len:,}")
            config = _with(_with(config, "data", seq_len=seq_len), "evaluation", stride=None)
        if stride is not None:
            if not 1 <= stride <= config.data.seq_len:
                raise ConfigError(f"the stride must be from 1 to {config.data.seq_len:,} tokens, the row length, not {stride:,}")
            config = _with(config, "evaluation", stride=stride)
        return config


def open_model(weights: Weights, tokenizer: Tokenizer, device: str = "auto", dtype: str | None = None) -> LoadedModel:
    """Load a model onto a device, cast to `dtype` (fp32, bf16 or fp16) if given; a cast model can generate but not score."""
    backend = open_inference(settings_on(weights, device), tokenizer.vocab_size)
    backend.load_weights(weights.tensors, str(weights.path))
    model = LoadedModel(replace(weights, tensors={}), tokenizer, backend)  # drop the tensors to free memory
    return model if dtype is None else model.cast(dtype)


def settings_on(weights: Weights, device: str) -> Config:
    """Return the config of the weights, with the given device and, for a custom model, the path of its Python file."""
    layers, own = weights.config.model.layers, weights.config.model.family == "file"
    if not own and layers > len(weights.tensors):  # the config of an untrusted file may request any number of layers
        raise CheckpointError(f"{weights.path} has fewer tensors than model.layers={layers:,} needs; it is damaged")
    config = _with(weights.config, "training", device=device)
    return _with(config, "model", file=str(model_file(weights))) if own else config


def _with(config: Config, section: str, **changes: str | int | None) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})


def find_tokenizer(weights: Weights, name: str | None = None, data: str | None = None) -> Tokenizer:
    """Return the tokenizer `name`; by default, the one stored with the model, or else that of `data` or of the training data."""
    path, facts, section = weights.path, weights.facts, weights.config.data
    own = from_spec(facts["tokenizer"]) if facts["tokenizer"] is not None else None
    if own is not None and name is None:
        return own
    if not (name or data or weights.names_data or section.tokenizer):
        chosen_tokenizer = assumed_tokenizer(path, weights.config.model.vocab_size or 0)
    else:
        try:
            if name:
                chosen_tokenizer = open_tokenizer(name)
            else:
                chosen_tokenizer = open_dataset(data or section.path, section.tokenizer, section.trust_tokens).tokenizer
        except DataError as error:
            raise CheckpointError(f"{path} was exported without its tokenizer, which cannot be found: {error}") from None
    if facts.get("tokenizer_fingerprint") not in (None, chosen_tokenizer.fingerprint()):
        was = "contains its tokenizer" if own is not None else "was exported without its tokenizer"
        other = f"{name or data or section.tokenizer or section.path} does not match that tokenizer"
        raise CheckpointError(f"{path} {was}, but {other}; give the tokenizer that the model was trained with")
    return chosen_tokenizer
