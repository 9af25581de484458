"""gpt-simple's Python functions train, generate, load_for_inference and validate_checkpoint, with its signatures and results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ingot.artifact.gpt_simple import model_keys
from ingot.backends.sampling import DTYPES
from ingot.backends.torch.state import load_model
from ingot.compat.gpt_simple.config import DataConfig, GptSimpleConfig, ModelConfig, OptimizerConfig, TrainingConfig
from ingot.compat.gpt_simple.model import SimpleLLM, SimpleLLMTokenizer
from ingot.compat.gpt_simple.reporter import Log
from ingot.compat.gpt_simple.training import GptSimpleResult, run_training
from ingot.errors import CheckpointError, ConfigError
from ingot.inference.model import Weights, find_tokenizer, open_weights
from ingot.runtime.files import user_path


class CheckpointInfo(NamedTuple):
    """The folders and the model section of a checkpoint that can be loaded."""

    checkpoint_dir: Path
    tokenizer_dir: Path
    model_config: ModelConfig


def train(
    model: ModelConfig | None = None,
    data: DataConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    training: TrainingConfig | None = None,
    config: GptSimpleConfig | str | Path | None = None,
    *,
    skip_runtime_probe: bool = False,
) -> GptSimpleResult:
    """Train from a config file or object; a section passed as an argument replaces the whole section. Arguments are not modified.

    `skip_runtime_probe` is accepted for compatibility and has no effect: runs start without a trial step.
    """
    whole = config if isinstance(config, GptSimpleConfig) else GptSimpleConfig.from_file(config) if config is not None else None
    given = {"model": model, "data": data, "optimizer": optimizer, "training": training}
    sections = {name: section for name, section in given.items() if section is not None}
    chosen = replace(whole, **sections) if whole is not None else GptSimpleConfig(**sections)  # type: ignore[arg-type]
    return run_training(chosen, Log())[1]


def load_for_inference(
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    tokenizer_path: str | Path | None = None,
) -> tuple[SimpleLLM, SimpleLLMTokenizer, ModelConfig]:
    """Load a checkpoint, or a run's newest one: the model in eval mode, its tokenizer and its section `model`."""
    kind = dtype if isinstance(dtype, torch.dtype) or dtype is None else _dtype(dtype)
    weights, config = _open(path)
    tokenizer = _tokenizer(weights, tokenizer_path)
    place = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    model = SimpleLLM(config)
    load_model(model, weights.tensors, str(weights.path))
    return model.to(dtype=kind).to(place).eval(), tokenizer, config


def validate_checkpoint(
    path: str | Path, *, tokenizer_path: str | Path | None = None, load_tokenizer: bool = True
) -> CheckpointInfo:
    """Check that a checkpoint, and with `load_tokenizer` its tokenizer, can be loaded; raise CheckpointError if not."""
    weights, config = _open(path)
    if load_tokenizer:
        _tokenizer(weights, tokenizer_path)
    beside = [weights.path / "tokenizer", weights.path.parent.parent / "tokenizer", weights.path]
    folder = Path(tokenizer_path) if tokenizer_path is not None else next(place for place in beside if place.is_dir())
    return CheckpointInfo(weights.path, folder, config)


@torch.inference_mode()
def generate(
    model: SimpleLLM,
    tokenizer: SimpleLLMTokenizer,
    prompts: str | Iterable[str],
    *,
    max_new_tokens: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    do_sample: bool = True,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    return_full_text: bool = False,
) -> list[str]:
    """Return the completion of each prompt, with the prompt if `return_full_text`; special tokens are shown by their names."""
    if seed is not None:
        torch.manual_seed(seed)
    device, texts = next(model.parameters()).device, []
    for prompt in [prompts] if isinstance(prompts, str) else prompts:
        ids = torch.as_tensor(tokenizer.encode(prompt) or [tokenizer.bos_token_id or 0], device=device)[None]
        out = model.generate(
            ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            do_sample=do_sample,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            repetition_penalty=repetition_penalty,
        )[0].tolist()
        text = tokenizer.decode(out if return_full_text else out[ids.size(1) :], skip_special_tokens=False)
        texts.append(str(text))
    return texts


def _open(path: str | Path) -> tuple[Weights, ModelConfig]:
    weights = open_weights(user_path(path))
    section: dict[str, Any] = weights.config.model.model_dump()
    if section["family"] != "llama":
        raise CheckpointError(
            f"{weights.path} holds a model of the {section['family']} family; SimpleLLM loads the llama family only"
        )
    rows = weights.tensors["wte.weight"].shape[0]
    section |= {"vocab_size": rows, "context": section["context"] or weights.config.data.seq_len}
    return weights, ModelConfig(**model_keys(section, weights.config.data.document_mask))


def _tokenizer(weights: Weights, path: str | Path | None) -> SimpleLLMTokenizer:
    return SimpleLLMTokenizer("", find_tokenizer(weights, str(path) if path is not None else None))


def _dtype(name: str) -> torch.dtype:
    if name.lower() not in DTYPES:
        raise ConfigError(f"dtype={name} must be {', '.join(DTYPES)} or a torch.dtype")
    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[DTYPES[name.lower()]]
