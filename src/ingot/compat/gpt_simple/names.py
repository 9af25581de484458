"""What gpt-simple calls the settings of ours and their values: keys that are the same thing, and how errors name the rest."""

from __future__ import annotations

from dataclasses import replace

from ingot.artifact.gpt_simple import ACTIVATIONS, MLPS, MODEL_KEYS
from ingot.errors import CannotContinue, IngotError
from ingot.runs.checkpoints import NAME_A_CHECKPOINT

# Keys whose value is a setting's value.
SETTINGS = {
    "data.path": "data.path",
    "data.max_length": "data.seq_len",
    "optimizer.learning_rate": "optimizer.learning_rate",
    "optimizer.weight_decay": "optimizer.weight_decay",
    "optimizer.beta1": "optimizer.beta1",
    "optimizer.beta2": "optimizer.beta2",
    "optimizer.eps": "optimizer.epsilon",
    "optimizer.max_grad_norm": "optimizer.clip_norm",
    "optimizer.warmup_steps": "optimizer.warmup_steps",
    "optimizer.min_lr_ratio": "optimizer.floor",
    "training.per_device_batch_size": "training.micro_batch",
    "training.max_steps": "training.max_steps",
    "training.seed": "training.seed",
    "training.logging_steps": "tracking.log_every",
    "training.eval_steps": "evaluation.every",
    "training.save_steps": "training.save_every",
    "training.output_dir": "training.output_dir",
    "training.keep_last_k": "training.keep_last",
    "training.max_runtime_seconds": "training.max_runtime_seconds",
    "training.walltime_reserve_seconds": "training.walltime_reserve_seconds",
}
# Keys of which a setting is made, by a rule that translate.py has; those of the model by model_settings.
MADE_INTO = {
    **{f"model.{theirs}": f"model.{ours}" for theirs, ours in MODEL_KEYS.items() if ours},
    "model.attention_mode": "data.document_mask",
    "data.tokenizer": "data.tokenizer",
    "data.overlap_size": "data.overlap",
    "data.packing": "data.sampling",
    "data.curriculum": "data.phases",
    "data.allow_bucket_exhaustion": "data.exhausted",
    "optimizer.decay_steps": "optimizer.decay_steps",
    "training.gradient_accumulation_steps": "training.tokens_per_step",
    "training.gradient_checkpointing": "training.gradient_checkpointing",
    "training.compile": "training.compile",
    "training.max_eval_batches": "evaluation.rows",
    "training.resume": "training.resume",
    "training.keep_milestone_every": "training.keep_every",
    "training.mixed_precision": "training.precision",
    "training.wandb_project": "tracking.wandb_project",
    "training.wandb_run_name": "tracking.wandb_run_name",
}
THEIRS = {ours: theirs for theirs, ours in {**MADE_INTO, **SETTINGS}.items() if ours != theirs}
# What its users write for a value of ours, where that is another word.
VALUES: dict[str, dict[object, str]] = {
    "model.activation": {ours: theirs for theirs, ours in ACTIVATIONS.items()},
    "model.mlp": {ours: theirs for theirs, ours in MLPS.items()},
    "data.document_mask": {True: "sdpa_mask or flex", False: "causal"},
    "data.sampling": {"pack": "true", "document": "false"},
    "training.precision": {"fp32": "no"},
}
# Advice that would be refused here: other words for it, or what is left of it.
ADVICE = {
    "on a CPU use fp32": "on a CPU use no",
    "lower {0}, raise {1} or add data": "lower {0} or add data",
    NAME_A_CHECKPOINT: "name a checkpoint or a run folder, auto or scratch",
}
_NAMES = THEIRS | {"training.tokens_per_step": "the tokens of a step", "data.mix": "the mix of the buckets"}


def key_name(path: str) -> str:
    """What gpt-simple's users know a setting of ours as."""
    return _NAMES.get(path, path)


def advice(text: str) -> str:
    """What is advised here where ours would be refused."""
    for ours, theirs in ADVICE.items():
        text = text.replace(ours, theirs)
    return text


def in_their_values(error: IngotError, resume: tuple[str, str]) -> None:
    """Give the settings that an error names the values that gpt-simple's users know; `resume`: training.resume here and there."""

    def theirs(path: str, value: object) -> object:
        if path == "training.resume":
            return resume[1] if value == resume[0] else value
        return VALUES[path].get(value, value) if path in VALUES else value

    error.settings = tuple(replace(one, value=theirs(one.path, one.value)) for one in error.settings)
    if isinstance(error, CannotContinue):
        error.changes = [replace(c, was=theirs(c.setting, c.was), now=theirs(c.setting, c.now)) for c in error.changes]
