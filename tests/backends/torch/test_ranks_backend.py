"""Several ranks that share a step: compiled or not, with recomputed blocks and document masks, the losses are the same."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ingot
from ingot.backends.torch.collectives import Collectives
from ingot.backends.torch.device import find_torch_device
from ingot.runtime.ranks import Ranks

PROGRAM = Path(__file__).with_name("rank_program.py")


def losses(world_size: int, settings: list[dict[str, Any]]) -> list[list[float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(Path(ingot.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    environment |= {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(settings)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(world_size)
    ]
    ended = [rank.communicate(timeout=600) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), b"\n".join(err for _, err in ended).decode()[-3000:]
    return json.loads(ended[0][0])


def test_sums_over_ranks_count_tokens_beyond_what_float32_holds(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = Collectives(Ranks(0, 2, 0), find_torch_device("cpu"))  # every sum goes the way of several ranks
    try:
        assert group.total([2**24 + 1, 2**53 - 1]) == [2**24 + 1, 2**53 - 1]
        assert group.maximum([2**24 + 1]) == [2**24 + 1]
    finally:
        group.close()


def test_compiled_ranks_that_recompute_some_blocks_take_the_steps_of_plain_ones():
    both = [{"compile": False}, {"compile": True, "gradient_checkpointing": 2}]
    plain, together = losses(2, both)
    assert together == pytest.approx(plain, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_compiling_ranks_checkpointing_and_masks_go_together_in_any_combination(world_size):
    for mask in (False, True):
        choices = itertools.product((False, True), (False, True, 2), (False, True))
        settings = [
            {"compile": c, "gradient_checkpointing": g, "ddp_python_reducer": r, "document_mask": mask} for c, g, r in choices
        ]
        sharded = itertools.product((False, "blocks"), (False, True, 2))
        settings += [{"compile": c, "gradient_checkpointing": g, "parallel": "fsdp", "document_mask": mask} for c, g in sharded]
        plain, *others = losses(world_size, settings)
        for found, how in zip(others, settings[1:], strict=True):
            assert found == pytest.approx(plain, abs=1e-5), how
