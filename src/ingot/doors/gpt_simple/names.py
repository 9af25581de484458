"""What gpt-simple calls the settings of ours: keys that are the same thing under another name, and how errors name the rest."""

from __future__ import annotations

# Keys whose value is a setting's value.
SETTINGS = {
    "model.n_embd": "model.width",
    "model.n_layer": "model.layers",
    "model.n_head": "model.heads",
    "model.n_kv_head": "model.kv_heads",
    "model.dropout": "model.dropout",
    "model.use_bias": "model.bias",
    "model.qkv_bias": "model.qkv_bias",
    "model.attn_out_bias": "model.attention_out_bias",
    "model.mlp_bias": "model.mlp_bias",
    "model.intermediate_size": "model.inner_width",
    "model.norm": "model.norm",
    "model.norm_eps": "model.norm_epsilon",
    "model.tie_word_embeddings": "model.tied",
    "model.rope_base": "model.rope_base",
    "model.rope_scaling_type": "model.rope_scaling",
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
# Keys of which a setting is made, by a rule that translate.py has.
MADE_INTO = {
    "model.vocab_size": "model.vocab_size",
    "model.n_positions": "model.context",
    "model.activation": "model.activation",
    "model.mlp_type": "model.mlp",
    "model.rope_scaling_factor": "model.rope_factor",
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
# Keys that say what is read, checked or ignored, and are not settings of a run.
NO_SETTING = {
    "data.format": "the files below data.path say what they are",
    "data.num_workers": "taken and without effect",
    "data.allow_budget_mismatch": "decides how `validate` judges the plan",
}
THEIRS = {ours: theirs for theirs, ours in {**MADE_INTO, **SETTINGS}.items() if ours != theirs}
_NAMES = THEIRS | {"training.tokens_per_step": "the tokens of a step", "data.mix": "the mix of the buckets"}


def key_name(path: str) -> str:
    """What gpt-simple's users know a setting of ours as."""
    return _NAMES.get(path, path)
