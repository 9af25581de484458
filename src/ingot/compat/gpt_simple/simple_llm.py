"""gpt-simple's Python API: SimpleLLM, SimpleLLMTokenizer, train, generate, load_for_inference and validate_checkpoint.

The model is Ingot's llama family, whose parameters already have gpt-simple's names; this file adds gpt-simple's signatures. As in
the original package, the model shifts the labels itself and ignores labels of -100. A tokenizer that cannot be loaded is an
error: there is no fallback to another one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.artifact.gpt_simple import model_keys, model_settings, tokenizer_folder
from ingot.backends.sampling import DTYPES, GenerationOptions
from ingot.backends.torch.build import checkpoint_blocks
from ingot.backends.torch.generate import generate as generate_tokens
from ingot.backends.torch.state import load_model
from ingot.compat.gpt_simple.config import DataConfig, GptSimpleConfig, ModelConfig, OptimizerConfig, TrainingConfig
from ingot.compat.gpt_simple.training import GptSimpleResult as TrainingResult
from ingot.compat.gpt_simple.training import run_training
from ingot.compat.gpt_simple.translate import tokenizer_name
from ingot.data.tokenizers import Tokenizer, open_tokenizer
from ingot.data.tokenizers.hf_json import HFTokenizer
from ingot.errors import CheckpointError, ConfigError
from ingot.inference.model import Weights, find_tokenizer, open_weights
from ingot.model.layers import LayerCache
from ingot.model.llama import Llama
from ingot.runtime.files import user_path

IGNORED = -100  # label that the loss ignores
PAD = "<|pad|>"
TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class CausalLMOutput:
    """The model's output if `return_dict=True`; its fields can also be read by key, for example output["loss"]."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: list[LayerCache] | None = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __contains__(self, name: str) -> bool:
        return getattr(self, name, None) is not None


class SimpleLLM(Llama):
    """gpt-simple's model. It returns the loss (given `labels`), logits and cache (if used) as a tuple or CausalLMOutput."""

    def __init__(self, config: ModelConfig, gradient_checkpointing: bool = False):
        config.check()
        if config.vocab_size is None:
            raise ConfigError("ModelConfig.vocab_size is not set; set it to the number of embedding rows")
        settings = model_settings(asdict(config), "ModelConfig")
        super().__init__(**{name: value for name, value in settings.items() if name != "family"})
        self.config = config
        if gradient_checkpointing:
            checkpoint_blocks(self)

    def get_num_params(self, non_embedding: bool = True) -> int:
        """Return the parameter count, by default without the token embedding."""
        count = sum(p.numel() for p in self.parameters())
        return count - self.wte.weight.numel() if non_embedding else count

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        doc_ids: Tensor | None = None,
        past_key_values: list[LayerCache] | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutput | tuple[Any, ...]:
        cache = past_key_values or (self.new_cache(input_ids.size(0)) if use_cache else None)
        if attention_mask is not None and not bool(attention_mask[:, 0].all()):
            raise ConfigError("attention_mask masks the start of a row; pad rows on the right")
        if position_ids is not None and past_key_values is None:
            expected = torch.arange(position_ids.size(-1), device=position_ids.device)
            # gpt-simple assigns position 0 to padding. Padding is on the right, so no real token attends to it.
            if not bool(((position_ids == expected) | (position_ids == 0)).all()):
                raise ConfigError("position_ids must count up from 0 in every row (0 for padding), or be None")
        documents = doc_ids if self.config.attention_mode != "causal" else None
        logits = self.logits(self.hidden(input_ids, cache, documents))
        loss = None
        if labels is not None:
            shifted = logits[:, :-1].flatten(0, 1).float()
            loss = F.cross_entropy(shifted, labels[:, 1:].flatten(), ignore_index=IGNORED)
        if return_dict:
            return CausalLMOutput(loss, logits, cache)
        return tuple(part for part in (loss, logits, cache) if part is not None)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        do_sample: bool = True,
        pad_token_id: int | None = None,
        eos_token_id: int | None = None,
        repetition_penalty: float = 1.0,
    ) -> Tensor:
        """Return `input_ids` with up to `max_new_tokens` tokens appended to each row; stop early when all rows have ended.

        A row ends with `eos_token_id` and is then padded with `pad_token_id`, if given. torch.manual_seed seeds the sampling.
        """
        ids = input_ids if input_ids.dim() == 2 else input_ids[None]  # (B, T)
        seed = int(torch.randint(2**31, ()))
        options = GenerationOptions(max_new_tokens, temperature, top_k, top_p, not do_sample, repetition_penalty, seed)
        completion: list[Tensor] = []
        ended = torch.zeros(ids.size(0), dtype=torch.bool, device=ids.device)
        for tokens in islice(generate_tokens(self, ids, options.sampling(ids.size(0))), max_new_tokens):
            completion.append((tokens if pad_token_id is None else tokens.masked_fill(ended, pad_token_id))[:, None])
            if eos_token_id is not None:
                ended |= tokens == eos_token_id
            if bool(ended.all()):
                break
        return torch.cat([ids, *completion], dim=1)


class SimpleLLMTokenizer:
    """A tokenizer given by name, file or folder; if it has no pad token, the pad id is one above its last id."""

    def __init__(self, model_name: str = "gpt2", tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer if tokenizer is not None else open_tokenizer(tokenizer_name(model_name))
        pad = self.tokenizer.pad
        self.eos_token_id = self.eod_token_id = self.tokenizer.eos
        self.bos_token_id = self.tokenizer.bos if self.tokenizer.bos is not None else self.eos_token_id
        self.pad_token_id: int = self.tokenizer.vocab_size if pad is None else pad
        self.vocab_size = self.tokenizer.vocab_size + (pad is None)

    def encode(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        max_length: int | None = None,
        padding: bool = False,
        truncation: bool = False,
        return_tensors: str | None = None,
    ) -> list[int] | list[list[int]] | torch.Tensor:
        """Encode one or several texts; `return_tensors="pt"` returns a tensor (rows, tokens).

        Special tokens are never added, regardless of `add_special_tokens`: gpt-simple's training adds them itself.
        """
        single = isinstance(text, str)
        texts = [text] if isinstance(text, str) else text
        rows = [self.tokenizer.encode(part).tolist() for part in texts]
        if truncation and max_length is not None:
            rows = [row[:max_length] for row in rows]
        if padding:
            width = max_length if max_length is not None else max(map(len, rows), default=0)
            rows = [row + [self.pad_token_id] * (width - len(row)) for row in rows]
        if return_tensors is None:
            return rows[0] if single else rows
        if return_tensors != "pt":
            raise ConfigError(f"return_tensors={return_tensors!r} must be 'pt' or None")
        return torch.tensor(rows, dtype=torch.long)

    def decode(
        self, token_ids: Any, skip_special_tokens: bool = True, clean_up_tokenization_spaces: bool = True
    ) -> str | list[str]:
        """Decode one or several rows of tokens; special tokens are skipped or shown by name."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        several = ids and isinstance(ids[0], list)
        return [self._text(row, skip_special_tokens) for row in ids] if several else self._text(ids or [], skip_special_tokens)

    def tokenize(self, text: str) -> list[str]:
        """Split a text into tokens and return them as strings."""
        return self.convert_ids_to_tokens(self.tokenizer.encode(text).tolist())

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the string of each token."""
        return [self._text([i], False) for i in ids]

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int]:
        """Return the id of each token; raise ConfigError for a string that is not a token."""
        ids, names = list[int](), self._names()
        for token in tokens:
            encoded = [names[token]] if token in names else self.tokenizer.encode(token).tolist()
            if len(encoded) != 1:
                raise ConfigError(f"{token!r} is not a token of this tokenizer: it is encoded as {len(encoded)} tokens")
            ids += encoded
        return ids

    def _names(self) -> dict[str, int]:
        named = {PAD: self.pad_token_id}
        if self.eos_token_id is not None:
            name = "<|endoftext|>" if self.tokenizer.kind == "gpt2" else "</s>"
            if isinstance(self.tokenizer, HFTokenizer):
                added = json.loads(self.tokenizer.contents).get("added_tokens", [])
                name = next((str(token["content"]) for token in added if token.get("id") == self.eos_token_id), name)
            named[name] = self.eos_token_id
        return named

    def _text(self, ids: Sequence[int], skip_special: bool) -> str:
        if skip_special:
            return self.tokenizer.decode([i for i in ids if i < self.tokenizer.vocab_size])
        names = {number: name for name, number in self._names().items()}
        runs = groupby(ids, key=names.get)  # ordinary tokens, which have no name, are decoded together
        return "".join(self.tokenizer.decode(list(run)) if name is None else name * len(list(run)) for name, run in runs)


class CheckpointInfo(NamedTuple):
    """A valid checkpoint: its folder, its tokenizer's folder and its ModelConfig."""

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
) -> TrainingResult:
    """Train from a config file or object; a section given as an argument replaces that of `config`. Arguments stay unmodified.

    `skip_runtime_probe` exists for compatibility and has no effect: runs start without a trial step.
    """
    if not isinstance(config, GptSimpleConfig):
        config = GptSimpleConfig() if config is None else GptSimpleConfig.from_file(config)
    arguments = {"model": model, "data": data, "optimizer": optimizer, "training": training}
    sections: dict[str, Any] = {name: section for name, section in arguments.items() if section is not None}
    return run_training(replace(config, **sections))[1]


def load_for_inference(
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    tokenizer_path: str | Path | None = None,
) -> tuple[SimpleLLM, SimpleLLMTokenizer, ModelConfig]:
    """Load a checkpoint, or the newest one of a run; return the model in eval mode, its tokenizer and its ModelConfig."""
    if isinstance(dtype, str):
        if dtype.lower() not in DTYPES:
            raise ConfigError(f"dtype={dtype} must be one of {', '.join(DTYPES)} or a torch.dtype")
        dtype = TORCH_DTYPES[DTYPES[dtype.lower()]]
    weights, config = _open(path)
    tokenizer = SimpleLLMTokenizer("", find_tokenizer(weights, str(tokenizer_path) if tokenizer_path is not None else None))
    place = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    model = SimpleLLM(config)
    load_model(model, weights.tensors, str(weights.path))
    return model.to(dtype=dtype).to(place).eval(), tokenizer, config


def validate_checkpoint(
    path: str | Path, *, tokenizer_path: str | Path | None = None, load_tokenizer: bool = True
) -> CheckpointInfo:
    """Check that a checkpoint and, if `load_tokenizer`, its tokenizer can be opened; return its CheckpointInfo."""
    weights, config = _open(path)
    if load_tokenizer:
        find_tokenizer(weights, str(tokenizer_path) if tokenizer_path is not None else None)
    return CheckpointInfo(weights.path, Path(tokenizer_path or tokenizer_folder(weights.path) or weights.path), config)


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
    """Return a completion for each prompt, preceded by the prompt if `return_full_text`; special tokens are shown by name."""
    if seed is not None:
        torch.manual_seed(seed)
    device, texts = next(model.parameters()).device, []
    for prompt in [prompts] if isinstance(prompts, str) else prompts:
        ids = torch.as_tensor(tokenizer.encode(prompt) or [tokenizer.bos_token_id or 0], device=device)[None]
        sampling = (max_new_tokens, temperature, top_k, top_p, do_sample)
        out = model.generate(ids, *sampling, tokenizer.pad_token_id, tokenizer.eos_token_id, repetition_penalty)[0].tolist()
        text = tokenizer.decode(out if return_full_text else out[ids.size(1) :], skip_special_tokens=False)
        texts.append(str(text))
    return texts


def _open(path: str | Path) -> tuple[Weights, ModelConfig]:
    weights = open_weights(user_path(path))
    section: dict[str, Any] = weights.config.model.model_dump()
    if section["family"] != "llama":
        what = f"{weights.path} holds a model of the {section['family']} family"
        raise CheckpointError(f"{what}; SimpleLLM loads the llama family only")
    rows = weights.tensors["wte.weight"].shape[0]
    section |= {"vocab_size": rows, "context": section["context"] or weights.config.data.seq_len}
    return weights, ModelConfig(**model_keys(section, weights.config.data.document_mask))
