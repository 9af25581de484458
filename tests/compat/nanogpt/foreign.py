"""Checkpoints as nanoGPT itself writes them, made with nothing of ours: torch's AdamW in its two groups, and its six keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

GOLDEN = Path(__file__).parents[2] / "golden"
CASES: dict[str, dict[str, Any]] = {
    Path(case["file"]).stem: case for case in json.loads((GOLDEN / "golden.json").read_text())["nanogpt"]
}
ARGUMENTS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
# The 33 settings that train.py records, for a run on characters.
CONFIG: dict[str, Any] = {
    "out_dir": "out", "eval_interval": 2000, "log_interval": 1, "eval_iters": 200, "eval_only": False,
    "always_save_checkpoint": True, "init_from": "scratch", "wandb_log": False, "wandb_project": "owt",
    "wandb_run_name": "gpt2", "dataset": "words", "gradient_accumulation_steps": 40, "batch_size": 12, "block_size": 32,
    "n_layer": 3, "n_head": 4, "n_embd": 48, "dropout": 0.0, "bias": True, "learning_rate": 1e-3, "max_iters": 600000,
    "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0, "decay_lr": True, "warmup_iters": 2000,
    "lr_decay_iters": 600000, "min_lr": 6e-5, "backend": "nccl", "device": "cpu", "dtype": "float32", "compile": False,
}  # fmt: skip


def names(layers: int, bias: bool) -> list[str]:
    """The parameters of nanoGPT's model in the order it has them."""
    block = ["ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias"]
    block += ["ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"]
    blocks = [f"transformer.h.{i}.{name}" for i in range(layers) for name in block]
    ends = ["transformer.ln_f.weight", "transformer.ln_f.bias"]
    found = ["transformer.wte.weight", "transformer.wpe.weight", *blocks, *ends]
    return [name for name in found if bias or not name.endswith("bias")]


def groups(shapes: dict[str, Tensor]) -> list[list[str]]:
    """Those that decay and those that do not, as configure_optimizers has them."""
    return [[n for n, p in shapes.items() if p.dim() >= 2], [n for n, p in shapes.items() if p.dim() < 2]]


class Foreign:
    """A small model of nanoGPT's after three steps; its weights are golden ones."""

    def __init__(self, case: str = "nanogpt_bias", order: Any = groups) -> None:
        self.case, self.golden = CASES[case], load_file(GOLDEN / CASES[case]["file"])
        self.args = {name: self.case[name] for name in ARGUMENTS}
        draw = torch.Generator().manual_seed(0)
        every = names(self.args["n_layer"], self.args["bias"])
        self.parameters = {name: nn.Parameter(self.golden[f"before.{name}"].clone()) for name in every}
        self.groups = order({name: p.detach() for name, p in self.parameters.items()})
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [self.parameters[name] for name in self.groups[0]], "weight_decay": 0.1},
                {"params": [self.parameters[name] for name in self.groups[1]], "weight_decay": 0.0},
            ],
            lr=1e-3,
            betas=(0.9, 0.95),
        )
        for _ in range(3):
            for p in self.parameters.values():
                p.grad = torch.randn(p.shape, generator=draw)
            self.optimizer.step()
        for name, p in self.parameters.items():  # the weights that the golden logits are of
            p.data.copy_(self.golden[f"before.{name}"])

    def contents(self, prefix: str = "") -> dict[str, Any]:
        """What it saves: `prefix` as torch.compile puts it in front."""
        state = {name: p.detach() for name, p in self.parameters.items()}
        state["lm_head.weight"] = state["transformer.wte.weight"]
        return {
            "model": {prefix + name: value for name, value in state.items()},
            "optimizer": self.optimizer.state_dict(),
            "model_args": self.args,
            "iter_num": 3,
            "best_val_loss": torch.tensor(2.5),
            "config": {**CONFIG, "bias": self.args["bias"]},
        }

    def save(self, path: Path, prefix: str = "", **changes: Any) -> Path:
        """The file; a key that is changed to None is left out."""
        found = {**self.contents(prefix), **changes}
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({key: value for key, value in found.items() if value is not None}, path)
        return path

    def memory(self) -> dict[str, Tensor]:
        """The optimizer's memory as `parameter/key`."""
        return {
            f"{name}/{key}": self.optimizer.state[p][key]
            for name, p in self.parameters.items()
            for key in ("step", "exp_avg", "exp_avg_sq")
        }
