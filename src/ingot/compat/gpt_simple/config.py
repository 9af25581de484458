"""gpt-simple's configuration: its 59 keys in four sections, read from a YAML or JSON file and a command line.

The section dataclasses define the keys: parsing, `init`, the command line and docs/gpt-simple.md are derived from them. A section
is validated when it is created, and the whole config again before use, because sections are mutable.

An unquoted YAML scalar is parsed as its key's type, so `learning_rate: 3e-4` is a number and `mixed_precision: no` is a string; a
plain YAML parser would return a string and a boolean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any

from ingot.artifact.gpt_simple import ACTIVATIONS, MLPS, MODEL_KEYS
from ingot.compat.options import Option, closest, names_of_settings
from ingot.config.fields import known
from ingot.config.text import NULLS, Plain, format_value, parse_yaml, scalar
from ingot.errors import ConfigError
from ingot.model.settings import nearest_divisor
from ingot.runs.checkpoints import NAME_A_CHECKPOINT
from ingot.runtime.files import open_to_read, readable

OVERLAP_TOKENS = 256
BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}  # YAML 1.1 booleans


def key(default: Any, help: str, *choices: str, sets: str = "", becomes: str = "", **bounds: float) -> Any:
    """Return the dataclass field of a key; translate() copies its value to the setting `sets`, or computes `becomes` from it."""
    about = {"help": help, "choices": choices, "sets": sets or becomes, "computed": bool(becomes), **bounds}
    return field(default=default, metadata=about)


class KeySection:
    """Base class of the sections; values are converted to their types and validated on creation."""

    def check(self) -> None:
        """Convert every value to its key's type; raise ConfigError for invalid values."""
        section = next(name for name, kind in SECTIONS.items() if kind is type(self))
        for key_field in fields(self):  # type: ignore[arg-type]
            setattr(self, key_field.name, typed(all_keys()[f"{section}.{key_field.name}"], getattr(self, key_field.name)))
        self.check_together()

    __post_init__ = check

    def check_together(self) -> None:
        """Raise ConfigError if the values of several keys contradict each other."""


@dataclass
class ModelConfig(KeySection):
    """The size and architecture of the model."""

    vocab_size: int | None = key(None, "Embedding rows. Training uses the vocabulary size, padded to a multiple of 128.", low=1)
    n_embd: int = key(768, "Width of the residual stream.", low=1)
    n_layer: int = key(12, "Number of transformer blocks.", low=1)
    n_head: int = key(12, "Number of attention heads; must divide n_embd.", low=1)
    n_kv_head: int | None = key(None, "Number of key and value heads; must divide n_head. null: the value of n_head.", low=1)
    n_positions: int = key(2048, "Context length in tokens; raised to data.max_length if it is smaller.", low=1)
    dropout: float = key(0.0, "Dropout probability.", low=0, below=1)
    use_bias: bool = key(False, "Use biases in all linear layers; qkv_bias, attn_out_bias and mlp_bias override this.")
    qkv_bias: bool | None = key(None, "Use biases for queries, keys and values. null: the value of use_bias.")
    attn_out_bias: bool | None = key(None, "Use a bias in the attention output projection. null: the value of use_bias.")
    mlp_bias: bool | None = key(None, "Use biases in the MLP. null: the value of use_bias.")
    activation: str = key("swish", "Activation function of the MLP; gelu is the tanh approximation.", "swish", "gelu", "relu")
    mlp_type: str = key("gated", "gated: an MLP of three matrices, one for the gate. mlp: two matrices.", "gated", "mlp")
    intermediate_size: int | None = key(
        None, "Hidden size of the MLP. null: 4 * n_embd or, if gated, 8/3 * n_embd rounded up to a multiple of 256.", low=1
    )
    norm: str = key("rmsnorm", "Normalisation layer.", "rmsnorm", "layernorm")
    norm_eps: float = key(1e-5, "Epsilon of the normalisation layers.", above=0, below=1)
    tie_word_embeddings: bool = key(True, "Use the token embedding as the output head.")
    rope_base: float = key(10000.0, "Base of the rotary embeddings.", above=1)
    rope_scaling_type: str | None = key(None, "How rope_scaling_factor is applied. null: not at all.", "linear", "ntk")
    rope_scaling_factor: float = key(1.0, "Scaling factor of rotary embeddings; unused if rope_scaling_type is null.", above=0)
    attention_mode: str = key(
        "causal", "causal: tokens attend to all earlier tokens of the row. sdpa_mask, flex: only to those of the same document.",
        "causal", "sdpa_mask", "flex", becomes="data.document_mask",
    )  # fmt: skip

    def check_together(self) -> None:
        if self.n_embd % self.n_head:
            near = nearest_divisor(self.n_embd, self.n_head)
            raise ConfigError(f"model.n_head={self.n_head} must divide model.n_embd={self.n_embd}; try {near}")
        if self.n_head % self.kv_heads:
            raise ConfigError(f"model.n_kv_head={self.n_kv_head} does not divide model.n_head={self.n_head}")
        if (size := self.n_embd // self.n_head) % 2:
            raise ConfigError(f"model.n_embd={self.n_embd} / model.n_head={self.n_head} = {size}, but the head size must be even")
        if self.rope_scaling_type is not None and (factor := self.rope_scaling_factor) < 1:
            raise ConfigError(f"model.rope_scaling_factor={factor:g} must be 1 or more if rope_scaling_type is set")

    @property
    def kv_heads(self) -> int:
        """Return the number of key and value heads: n_kv_head if set, else n_head."""
        return self.n_kv_head or self.n_head

    def intermediate_dim(self) -> int:
        """Return the hidden size of the MLP: intermediate_size if set, else its default."""
        gated = -(-(8 * self.n_embd // 3) // 256) * 256
        return self.intermediate_size or (gated if self.mlp_type == "gated" else 4 * self.n_embd)


def _number(value: Any) -> Any:
    number = scalar(value) if isinstance(value, str) else value
    return value if number is None else number


TOKENS, WEIGHT = Option("duration_tokens", "int", None, "", low=1), Option("mix", "float", None, "", low=0)


@dataclass
class CurriculumPhase:
    """A phase of the training run with its own bucket weights, which are normalised to sum to 1."""

    duration_tokens: int
    mix: dict[str, float]

    def __post_init__(self) -> None:
        self.duration_tokens = TOKENS.check(_number(self.duration_tokens))
        if not isinstance(self.mix, dict) or not self.mix:
            raise ConfigError(f"mix={self.mix!r} must be a mapping with at least one bucket and its weight")
        weights = {name: WEIGHT.check(_number(weight)) for name, weight in self.mix.items()}
        if not (total := sum(weights.values())):
            raise ConfigError("mix needs at least one bucket with a positive weight")
        self.mix = {name: weight / total for name, weight in weights.items()}


@dataclass
class DataConfig(KeySection):
    """The training data and how it is arranged in rows."""

    path: str = key("", "Data folder; train/BUCKET and val/BUCKET in it hold .bin/.idx pairs or .jsonl files.", sets="data.path")
    tokenizer: str = key("gpt2", "Name or folder of the tokenizer.", becomes="data.tokenizer")
    format: str = key("pretokenized", "pretokenized: .bin/.idx pairs. jsonl: text in .jsonl files.", "pretokenized", "jsonl")
    max_length: int = key(2048, "Tokens per training row.", low=2, sets="data.seq_len")
    overlap_size: int = key(OVERLAP_TOKENS, "Tokens that adjacent windows of a .jsonl text share.", low=0, becomes="data.overlap")
    packing: bool = key(True, "Pack several documents into a row. false: one document per row.", becomes="data.sampling")
    num_workers: int = key(4, "Accepted, but has no effect: a single thread reads the data ahead of training.", low=0)
    curriculum: list[CurriculumPhase] | None = key(  # noqa: RUF009 (a dataclass field, like those above)
        None, "Phases, each with duration_tokens and bucket weights (mix). null: equal weights throughout.", becomes="data.phases"
    )
    allow_bucket_exhaustion: bool = key(
        False, "Continue without a bucket that has been read completely. false: halt the run.", becomes="data.exhausted"
    )
    allow_budget_mismatch: bool = key(False, "Accept phases whose total tokens differ from those of max_steps by over 5%.")

    def check_together(self) -> None:
        if self.curriculum is not None:
            if not isinstance(self.curriculum, list) or not self.curriculum:
                raise ConfigError("data.curriculum must be null or a list of phases, each with duration_tokens and mix")
            for number, phase in enumerate(self.curriculum):
                try:
                    self.curriculum[number] = phase if isinstance(phase, CurriculumPhase) else CurriculumPhase(**phase)
                except (TypeError, ConfigError) as error:
                    why = "a key is missing or unknown" if isinstance(error, TypeError) else error
                    raise ConfigError(f"data.curriculum.{number}: {why}; give duration_tokens and mix for each phase") from None
            if self.format != "pretokenized":
                raise ConfigError("data.curriculum requires data.format=pretokenized; run `gpt-simple tokenize` first")
        overlap, length = self.overlap_size, self.max_length
        if overlap > length // 2 and (self.format == "jsonl" or overlap != OVERLAP_TOKENS):  # .bin/.idx data ignores the default
            what = f"data.overlap_size={overlap} is more than half of data.max_length={length}"
            raise ConfigError(f"{what}; set it to {length // 2} or less")


@dataclass
class OptimizerConfig(KeySection):
    """AdamW and its learning rate schedule."""

    learning_rate: float = key(3e-4, "Peak learning rate.", above=0, sets="optimizer.learning_rate")
    weight_decay: float = key(0.1, "Weight decay of matrices and embeddings.", low=0, sets="optimizer.weight_decay")
    beta1: float = key(0.9, "Decay rate of AdamW's first moment.", low=0, below=1, sets="optimizer.beta1")
    beta2: float = key(0.95, "Decay rate of AdamW's second moment.", low=0, below=1, sets="optimizer.beta2")
    eps: float = key(1e-8, "Epsilon of AdamW.", low=0, sets="optimizer.epsilon")
    max_grad_norm: float = key(1.0, "Clip the gradient to this norm.", above=0, sets="optimizer.clip_norm")
    warmup_steps: int = key(100, "Linear warmup steps; must be below training.max_steps.", low=0, sets="optimizer.warmup_steps")
    decay_steps: int | None = key(
        None, "Steps of the cosine decay. null: all steps after the warmup.", low=0, becomes="optimizer.decay_steps"
    )
    min_lr_ratio: float = key(0.1, "Final learning rate, as a fraction of the peak.", low=0, high=1, sets="optimizer.floor")


@dataclass
class TrainingConfig(KeySection):
    """The length of the run, its batches, checkpoints and precision."""

    per_device_batch_size: int = key(4, "Rows per forward pass of one rank.", low=1, sets="training.micro_batch")
    gradient_accumulation_steps: int = key(
        4, "Forward passes per rank and optimizer step.", low=1, becomes="training.tokens_per_step"
    )
    max_steps: int = key(1000, "Number of optimizer steps in the run.", low=1, sets="training.max_steps")
    gradient_checkpointing: bool = key(True, "Recompute activations to save memory.", becomes="training.gradient_checkpointing")
    compile: bool = key(True, "Use torch.compile; if this key is not set, only on GPUs.", becomes="training.compile")
    seed: int = key(42, "Seed of the initial weights and of dropout.", low=0, sets="training.seed")
    logging_steps: int = key(10, "Steps between log lines.", low=1, sets="tracking.log_every")
    eval_steps: int = key(500, "Steps between evaluations.", low=1, sets="evaluation.every")
    save_steps: int = key(1000, "Steps between checkpoints.", low=1, sets="training.save_every")
    max_eval_batches: int | None = key(None, "Batches per evaluation. null: 100.", low=1, becomes="evaluation.rows")
    output_dir: str = key("./outputs", "Folder of the run.", sets="training.output_dir")
    resume: str = key(
        "auto", "auto: resume the run in output_dir. scratch: a new run. PATH: resume this checkpoint.", becomes="training.resume"
    )
    keep_last_k: int | None = key(3, "Number of newest checkpoints to keep. null: all.", low=1, sets="training.keep_last")
    keep_milestone_every: int | None = key(None, "Steps between checkpoints kept forever.", low=1, becomes="training.keep_every")
    max_runtime_seconds: int | None = key(
        None, "Time limit of this session in seconds. null: until SLURM_JOB_END_TIME, else GPT_SIMPLE_MAX_RUNTIME, else none.",
        low=1, sets="training.max_runtime_seconds",
    )  # fmt: skip
    walltime_reserve_seconds: int = key(
        300, "Seconds of the time limit that are reserved for the last save.", low=0, sets="training.walltime_reserve_seconds"
    )
    mixed_precision: str | None = key(
        None, "no: fp32. null: bf16 on GPUs that support it, fp16 on older GPUs, no on a CPU.", "bf16", "fp16", "no",
        becomes="training.precision",
    )  # fmt: skip
    wandb_project: str | None = key(None, "Weights & Biases project. null: no tracking.", becomes="tracking.wandb_project")
    wandb_run_name: str | None = key(None, "W&B run name. null: gpt_simple_ and a timestamp.", becomes="tracking.wandb_run_name")

    def check_together(self) -> None:
        for name, example in {"resume": "auto", "output_dir": "./outputs"}.items():
            if not getattr(self, name):
                raise ConfigError(f"training.{name} is empty; set it, for example to {example}")


@dataclass
class GptSimpleConfig:
    """gpt-simple's Config: the four sections of a run.

    `given` holds the keys set in a file or on a command line; `settings` holds Ingot settings that gpt-simple has no key for.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    given: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    settings: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Validate the whole config; called on creation and again before use, because sections are mutable."""
        for name in SECTIONS:
            getattr(self, name).check()
        warmup, steps = self.optimizer.warmup_steps, self.training.max_steps
        if warmup >= steps:
            what = f"optimizer.warmup_steps={warmup} must be less than training.max_steps={steps}"
            raise ConfigError(f"{what}; lower it, for example to {steps // 10}, or raise training.max_steps")

    @classmethod
    def from_file(cls, path: str | Path) -> GptSimpleConfig:
        """Read the config from a YAML file, or from JSON if the suffix is .json."""
        return read_config(path)

    def to_dict(self) -> dict[str, Any]:
        """Return all 59 keys as a nested dict."""
        return {name: asdict(getattr(self, name)) for name in SECTIONS}

    def save(self, path: str | Path) -> None:
        """Write the config as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")


SECTIONS: dict[str, type[KeySection]] = {
    "model": ModelConfig, "data": DataConfig, "optimizer": OptimizerConfig, "training": TrainingConfig,
}  # fmt: skip


@cache
def all_keys() -> dict[str, Option]:
    """Return the option of every key by dotted path, in the order of the dataclasses."""
    options: dict[str, Option] = {}
    for section, kind in SECTIONS.items():
        for key_field in fields(kind):  # type: ignore[arg-type]
            type_name, _, rest = str(key_field.type).partition(" | ")
            type_name = "list" if type_name.startswith("list") else type_name
            about = dict(key_field.metadata)
            if not about["sets"] and section == "model":
                about |= {"sets": f"model.{MODEL_KEYS[key_field.name]}", "computed": True}  # by model_settings()
            path = f"{section}.{key_field.name}"
            options[path] = Option(path, type_name, key_field.default, null="null" if rest else "", **about)  # type: ignore[arg-type]
    return options


KEYS_OF_SETTINGS = {option.sets: path for path, option in all_keys().items() if option.sets}  # gpt-simple's key by Ingot setting


def typed(option: Option, value: Any) -> Any:
    """Convert a value from YAML, JSON, Python or a command line to its key's type; raise ConfigError if it is invalid."""
    if value is None or (isinstance(value, Plain) and value.lower() in NULLS):
        value = "" if option.kind == "str" and not option.null else None
    elif option.kind == "str" and not isinstance(value, list | Mapping):
        # YAML parses an unquoted `no` as false.
        value = "no" if "no" in option.choices and BOOLEANS.get(str(value).lower()) is False else str(value)
    elif option.kind == "bool" and isinstance(value, str):
        value = BOOLEANS.get(value.lower(), value)
    elif option.kind == "list":
        return value  # phases, which check_together() checks
    elif isinstance(value, str):
        value = _number(value)
    return option.check(value)


# Reading config files and command lines


def read_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> GptSimpleConfig:
    """Read a config file and apply overrides from a command line; one ConfigError reports all mistakes.

    Ingot settings without a gpt-simple key, such as training.device or data.trust_tokens, are accepted too.
    """
    problems, settings = list[str](), dict[str, Any]()
    values: dict[str, tuple[Any, str]] = {}  # dotted key -> (value, where it was set)
    for section, keys in read_tree(path).items():
        if section not in SECTIONS:
            problems.append(f"unknown section {section} (in {path}); the sections are {', '.join(SECTIONS)}")
        elif keys is not None and not isinstance(keys, Mapping):
            problems.append(f"{section} (in {path}) must be a section with keys below it")
        else:
            values |= {f"{section}.{name}": (value, f"in {path}") for name, value in (keys or {}).items()}
    for name, value in (overrides or {}).items():
        values[name] = (Plain(value) if isinstance(value, str) else value, "on the command line")
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name, (value, where) in values.items():
        section, _, field_name = name.partition(".")
        if name in all_keys():
            try:
                sections[section][field_name] = typed(all_keys()[name], value)
            except ConfigError as error:
                problems.append(f"{error} ({where})")
        elif name in known() and name not in KEYS_OF_SETTINGS:
            settings[name] = value
        else:
            elsewhere = next((path for path in all_keys() if path.endswith(f".{field_name}")), None)
            near = KEYS_OF_SETTINGS.get(name) or elsewhere or closest(name, all_keys())
            hint = f"did you mean {near}?" if near else "`gpt-simple init` lists all keys"
            problems.append(f"unknown key {name} ({where}); {hint}")
    if not problems:  # check combinations only if every value is valid on its own
        try:
            made = {name: section(**sections[name]) for name, section in SECTIONS.items()}
            return GptSimpleConfig(**made, given=frozenset(values), settings=settings)  # type: ignore[arg-type]
        except ConfigError as error:
            problems.append(str(error))
    raise ConfigError("; ".join(problems))


def read_tree(path: str | Path) -> dict[str, Any]:
    """Parse a config file into a dict of sections: JSON if the suffix is .json, else YAML."""
    file = Path(path)
    if not file.exists():
        raise ConfigError(f"there is no config file {file}; write one with `gpt-simple init -o {file}`")
    with readable(file, ConfigError), open_to_read(file) as opened:
        text = opened.read().decode("utf-8-sig")
    try:
        tree = json.loads(text) if file.suffix == ".json" else parse_yaml(text, str(file), aliases=True)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{file} is not a config: it needs sections such as `training:` with keys below them")
    return tree or {}


def is_gpt_simple(path: str | Path) -> bool:
    """Return True if a config file has keys that exist in gpt-simple but not in Ingot; some keys exist in both programs."""
    tree = read_tree(path)
    names = [f"{section}.{name}" for section, keys in tree.items() if isinstance(keys, Mapping) for name in keys]
    return any(name in all_keys() and name not in known() for name in names)


# Error messages in gpt-simple's terms

# Maps advice in Ingot's error messages that does not apply to gpt-simple to advice that does.
ADVICE = {
    "on a CPU use fp32": "on a CPU set it to no",
    "lower {0}, raise {1} or add data": "lower {0} or add data",
    NAME_A_CHECKPOINT: "name a checkpoint or a run folder, auto or scratch",
}
TOKENIZE = "gpt-simple tokenize --input_dir DIR --output_dir DATA/train/BUCKET, and again for DATA/val/BUCKET"

# gpt-simple's names for Ingot's settings, and for values that the two programs spell differently.
key_name = names_of_settings(
    all_keys(),
    {
        "training.tokens_per_step": "tokens per step",
        "data.mix": "the bucket weights",
        "data.document_mask=true": "sdpa_mask or flex",
        "data.document_mask=false": "causal",
        "data.sampling=pack": "true",
        "data.sampling=document": "false",
        **{f"model.activation={ours}": theirs for theirs, ours in ACTIVATIONS.items()},
        **{f"model.mlp={ours}": theirs for theirs, ours in MLPS.items()},
    },
)


def advice(text: str) -> str:
    """Rephrase the advice of an error message in gpt-simple's terms."""
    for ours, theirs in ADVICE.items():
        text = text.replace(ours, theirs)
    return re.sub("ingot data prepare .*", TOKENIZE, text)


# The config file that `gpt-simple init` writes

PRESETS = {
    "small": {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 2048},  # 123.6M parameters with GPT-2's vocabulary
    "medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 2048},  # 359.8M parameters
    "large": {"n_embd": 2048, "n_layer": 24, "n_head": 32, "n_positions": 2048},  # 1,336M parameters
}
HEADING = """\
# Config file for `gpt-simple train --config FILE`: every key with its meaning, allowed values and default.
# Commented-out keys have their defaults. To resume a stopped run, repeat the command. To check the config before training, run
# `gpt-simple validate --config FILE`.
"""
TEMPLATE_WIDTH = 100


def template(preset: str | None = None) -> str:
    """Return the text of a config file with every key; `preset` sets the size of the model."""
    values: dict[str, Any] = {f"model.{name}": value for name, value in PRESETS[preset or "small"].items()}
    values["data.path"] = "./data/tokenized"
    lines, last = [HEADING.rstrip()], ""
    for path, option in all_keys().items():
        section, _, name = path.partition(".")
        if section != last:
            lines += ["", f"# {SECTIONS[section].__doc__}", f"{section}:"]
            last = section
        about = f"{option.help} ({option.allowed})"
        lines.append(fill(about, TEMPLATE_WIDTH, initial_indent="  # ", subsequent_indent="  # ", break_on_hyphens=False))
        value = values.get(path, option.default)
        unset = "# " if value is None or path == "training.compile" else ""  # compile's default depends on the machine
        lines.append(f"  {unset}{name}: {format_value(value)}")
    return "\n".join(lines) + "\n"
