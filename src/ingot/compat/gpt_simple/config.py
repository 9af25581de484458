"""gpt-simple's configuration: four sections with its 59 keys, its defaults and its rules, and the Config they make up.

The fields are the one source of the keys: reading, `init`, the command line and docs/gpt-simple.md follow from them. A section
is checked when it is made, and a whole Config once more before it is used, whatever was set in between.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from ingot.compat.gpt_simple.keys import META, Key, key
from ingot.config.text import scalar
from ingot.errors import ConfigError
from ingot.model.settings import nearest_divisor


class Section:
    """A section of keys, whose values are understood and checked when it is made."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Take every value as its key means it, and refuse what is not allowed."""
        name = _NAMES[type(self)]
        for one in fields(self):  # type: ignore[arg-type]
            setattr(self, one.name, all_keys()[f"{name}.{one.name}"].understand(getattr(self, one.name)))
        self.fit()

    def fit(self) -> None:
        """Refuse values that do not go together."""


@dataclass
class ModelConfig(Section):
    """The model."""

    vocab_size: int | None = key(
        None, "Rows of the embedding. Always the tokenizer's ids and a pad token, up to a multiple of 128.", low=1
    )
    n_embd: int = key(768, "Width of the residual stream.", low=1)
    n_layer: int = key(12, "Transformer blocks.", low=1)
    n_head: int = key(12, "Attention heads; they divide n_embd.", low=1)
    n_kv_head: int | None = key(None, "Heads of keys and values; they divide n_head. null: n_head.", low=1)
    n_positions: int = key(2048, "Longest text the model can read; at least data.max_length.", low=1)
    dropout: float = key(0.0, "Part of the activations dropped in training.", low=0, below=1)
    use_bias: bool = key(False, "Biases in all linear layers, where the next three do not say otherwise.")
    qkv_bias: bool | None = key(None, "Biases of queries, keys and values. null: use_bias.")
    attn_out_bias: bool | None = key(None, "Bias of the projection after attention. null: use_bias.")
    mlp_bias: bool | None = key(None, "Biases of the MLP. null: use_bias.")
    activation: str = key("swish", "Activation of the MLP; gelu is its tanh form.", "swish", "gelu", "relu")
    mlp_type: str = key("gated", "gated: three matrices, the gate through the activation. mlp: two.", "gated", "mlp")
    intermediate_size: int | None = key(
        None, "Width inside the MLP. null: 8/3 of n_embd, up to a multiple of 256, if gated; else 4 times n_embd.", low=1
    )
    norm: str = key("rmsnorm", "Normalisation.", "rmsnorm", "layernorm")
    norm_eps: float = key(1e-5, "Added to the variance inside the norms.", above=0, below=1)
    tie_word_embeddings: bool = key(True, "The head is the token embedding.")
    rope_base: float = key(10000.0, "Base of the rotary positions.", above=1)
    rope_scaling_type: str | None = key(None, "Stretch the rotary positions by rope_scaling_factor.", "linear", "ntk")
    rope_scaling_factor: float = key(1.0, "How far; without effect where rope_scaling_type is null.", above=0)
    attention_mode: str = key(
        "causal", "causal: a row is one text. sdpa_mask, flex: tokens see only their own document.", "causal", "sdpa_mask", "flex"
    )

    def fit(self) -> None:
        if self.n_embd % self.n_head:
            near = nearest_divisor(self.n_embd, self.n_head)
            raise ConfigError(f"model.n_head={self.n_head} does not divide model.n_embd={self.n_embd}; the nearest is {near}")
        if self.n_head % (self.n_kv_head or self.n_head):
            raise ConfigError(f"model.n_kv_head={self.n_kv_head} does not divide model.n_head={self.n_head}")
        if self.n_embd // self.n_head % 2:
            size = self.n_embd // self.n_head
            raise ConfigError(f"model.n_embd={self.n_embd} over model.n_head={self.n_head} is {size}; a head needs an even size")
        if self.rope_scaling_type is not None and self.rope_scaling_factor < 1:
            raise ConfigError(
                f"model.rope_scaling_factor={self.rope_scaling_factor:g} must be 1 or more where rope_scaling_type is set"
            )


@dataclass
class CurriculumPhase:
    """A part of the run with a mix of its own; the weights are brought to a sum of 1."""

    duration_tokens: int
    mix: dict[str, float]

    def __post_init__(self) -> None:
        tokens, mix = _number(self.duration_tokens), self.mix
        if not isinstance(tokens, int | float) or isinstance(tokens, bool) or tokens <= 0 or tokens != int(tokens):
            raise ConfigError(f"data.curriculum: duration_tokens={self.duration_tokens} must be a whole number above 0")
        if not isinstance(mix, Mapping) or not mix:
            raise ConfigError("data.curriculum: a phase needs a mix of buckets, such as mix: {web: 0.7, code: 0.3}")
        weights = {str(name): _number(weight) for name, weight in mix.items()}
        for name, weight in weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
                raise ConfigError(f"data.curriculum: the weight {mix[name]} of {name} must be a number of 0 or more")
        if not sum(weights.values()) > 0:
            raise ConfigError("data.curriculum: the weights of a phase are all 0; give one of its buckets a weight above 0")
        self.duration_tokens = int(tokens)
        self.mix = {name: weight / sum(weights.values()) for name, weight in weights.items()}


def _number(value: Any) -> Any:
    return scalar(value) if isinstance(value, str) else value


OVERLAP_TOKENS = 256


@dataclass
class DataConfig(Section):
    """The text."""

    path: str = key("", "Folder {train,val}/<bucket>/ of .bin/.idx pairs, or of .jsonl files.")
    tokenizer: str = key("gpt2", "Name or folder of the tokenizer.")
    format: str = key("pretokenized", "What the buckets hold: .bin/.idx, or .jsonl.", "pretokenized", "jsonl")
    max_length: int = key(2048, "Tokens in a training row.", low=2)
    overlap_size: int = key(
        OVERLAP_TOKENS, "Tokens that windows of a long jsonl document share; at most half of max_length.", low=0
    )
    packing: bool = key(True, "Several documents in a row. false: one in each, padded.")
    num_workers: int = key(4, "Taken and without effect: one thread reads ahead.", low=0)
    curriculum: list[CurriculumPhase] | None = key(  # noqa: RUF009 (a field, as those above)
        None, "Phases, each with duration_tokens and a mix of buckets. null: every bucket with the same weight."
    )
    allow_bucket_exhaustion: bool = key(False, "Go on with the other buckets where one is read to its end. false: save and halt.")
    allow_budget_mismatch: bool = key(False, "Let the phases' tokens and those of max_steps differ by more than 5%.")

    def fit(self) -> None:
        if self.curriculum is not None:
            if not isinstance(self.curriculum, list | tuple) or not self.curriculum:
                raise ConfigError("data.curriculum must be a list of phases with duration_tokens and mix, or null")
            self.curriculum = [_phase(one) for one in self.curriculum]
            if self.format != "pretokenized":
                raise ConfigError("data.curriculum needs data.format=pretokenized; `gpt-simple tokenize` makes such data")
        unused = self.format != "jsonl" and self.overlap_size == OVERLAP_TOKENS  # the default is of no use there, and no mistake
        if self.overlap_size > self.max_length // 2 and not unused:
            raise ConfigError(
                f"data.overlap_size={self.overlap_size} is more than half of data.max_length={self.max_length}; "
                f"set it to {self.max_length // 2} or less"
            )


def _phase(value: Any) -> CurriculumPhase:
    if isinstance(value, CurriculumPhase):
        return CurriculumPhase(value.duration_tokens, value.mix)
    if not isinstance(value, Mapping):
        raise ConfigError("data.curriculum: a phase is a mapping with duration_tokens and mix")
    if unknown := [str(name) for name in value if name not in ("duration_tokens", "mix")]:
        raise ConfigError(f"data.curriculum: unknown key {unknown[0]}; a phase has duration_tokens and mix")
    if missing := [name for name in ("duration_tokens", "mix") if name not in value]:
        raise ConfigError(f"data.curriculum: a phase has no {missing[0]}")
    return CurriculumPhase(value["duration_tokens"], value["mix"])


@dataclass
class OptimizerConfig(Section):
    """AdamW, and how its learning rate moves."""

    learning_rate: float = key(3e-4, "Peak learning rate.", above=0)
    weight_decay: float = key(0.1, "Weight decay of tensors with two or more dimensions.", low=0)
    beta1: float = key(0.9, "Decay of the mean of gradients.", low=0, below=1)
    beta2: float = key(0.95, "Decay of the mean of squared gradients.", low=0, below=1)
    eps: float = key(1e-8, "Added to the root of the second moment.", low=0)
    max_grad_norm: float = key(1.0, "Gradients are scaled down to this norm.", above=0)
    warmup_steps: int = key(100, "Steps over which the learning rate rises; fewer than training.max_steps.", low=0)
    decay_steps: int | None = key(
        None, "Steps of the cosine after the warm-up; then the floor. null: the rest of the run.", low=0
    )
    min_lr_ratio: float = key(0.1, "The learning rate ends at this part of its peak.", low=0, high=1)


@dataclass
class TrainingConfig(Section):
    """The run."""

    per_device_batch_size: int = key(4, "Rows in one forward pass of one rank.", low=1)
    gradient_accumulation_steps: int = key(4, "Forward passes of each rank in a step.", low=1)
    max_steps: int = key(1000, "Optimizer steps.", low=1)
    gradient_checkpointing: bool = key(True, "Recompute activations in the backward pass where memory needs it.")
    compile: bool = key(True, "torch.compile; where it is not set, on GPUs only.")
    seed: int = key(42, "Decides the initial weights and dropout.", low=0)
    logging_steps: int = key(10, "Steps between log lines.", low=1)
    eval_steps: int = key(500, "Steps between evaluations.", low=1)
    save_steps: int = key(1000, "Steps between checkpoints.", low=1)
    max_eval_batches: int | None = key(None, "Batches of validation rows that an evaluation reads. null: 100.", low=1)
    output_dir: str = key("./outputs", "Folder of the run.")
    resume: str = key("auto", "auto: go on where the folder's run stands. scratch: refuse a folder with a run. Or a checkpoint.")
    keep_last_k: int | None = key(3, "Newest checkpoints that are kept. null: all.", low=1)
    keep_milestone_every: int | None = key(None, "Checkpoints at multiples of this step are kept too.", low=1)
    max_runtime_seconds: int | None = key(
        None, "Seconds of this session. null: until SLURM_JOB_END_TIME, or GPT_SIMPLE_MAX_RUNTIME seconds, if set.", low=1
    )
    walltime_reserve_seconds: int = key(300, "Seconds before that end at which the run saves and stops.", low=0)
    mixed_precision: str | None = key(
        None, "null: bf16 on GPUs that have it, fp16 on older ones, no on a CPU.", "bf16", "fp16", "no"
    )
    wandb_project: str | None = key(None, "Project of Weights & Biases. null: nothing is sent.")
    wandb_run_name: str | None = key(None, "Name of the run there. null: gpt_simple_ and the time.")

    def fit(self) -> None:
        if not self.resume:
            raise ConfigError("training.resume is empty; set it to auto, scratch or the path of a checkpoint")
        if not self.output_dir:
            raise ConfigError("training.output_dir is empty; give a folder, such as ./outputs")


@dataclass
class Config:
    """The four sections of a run.

    `given` are the keys that a file or a command line has set, `settings` those of our own settings that have no key there.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    given: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    settings: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._fit()

    def check(self) -> None:
        """Check everything again: a section may have been changed since it was made."""
        for name in SECTIONS:
            getattr(self, name).check()
        self._fit()

    def _fit(self) -> None:
        warmup, steps = self.optimizer.warmup_steps, self.training.max_steps
        if warmup >= steps:
            raise ConfigError(
                f"optimizer.warmup_steps={warmup} must be less than training.max_steps={steps}; lower it, to {steps // 10} for "
                "example, or raise the steps"
            )

    @classmethod
    def from_file(cls, path: str | Path) -> Config:
        """The config of a YAML file, or of a JSON file by its suffix."""
        from ingot.compat.gpt_simple.reading import read_config

        return read_config(path)

    def to_dict(self) -> dict[str, Any]:
        """All 59 keys as plain data."""
        return {name: asdict(getattr(self, name)) for name in SECTIONS}

    def save(self, path: str | Path) -> None:
        """Write the config as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")


SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "training": TrainingConfig,
}
_NAMES: dict[type[Any], str] = {section: name for name, section in SECTIONS.items()}


@cache
def all_keys() -> dict[str, Key]:
    """Every key by its dotted path, in order."""
    found: dict[str, Key] = {}
    for name, section in SECTIONS.items():
        for one in fields(section):  # type: ignore[arg-type]
            kind, _, rest = str(one.type).partition(" | ")
            kind = "list" if kind.startswith("list") else kind
            path = f"{name}.{one.name}"
            found[path] = Key(path, kind, rest == "None", one.default, one.metadata[META])
    return found
