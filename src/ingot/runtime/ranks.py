"""The rank of this process, from the environment that torchrun (or `ingot train --nproc-per-node`) sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from ingot.errors import ConfigError

# Variables that launchers set for ranks. A child process that inherits them would wait for a process group it does not belong to.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK")
LOCAL = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
RANK_PREFIXES = ("ROLE_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI_", "SLURM_PROC", "SLURM_LOCALID", "ACCELERATE_")


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, globally and on its machine, and the number of ranks, in all and on this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def first(self) -> bool:
        """Return True on rank 0, which writes files, prints, and measures the time for all ranks."""
        return self.rank == 0

    def share(self, rows: int) -> range:
        """Return the range of rows that this rank processes in a step of `rows` rows."""
        return self.shares(rows)[self.rank]

    def shares(self, rows: int) -> list[range]:
        """Return the range of rows that each rank processes in a step of `rows` rows; their lengths differ by at most one."""
        ends = [rows * rank // self.world_size for rank in range(self.world_size + 1)]
        return [range(first, stop) for first, stop in pairwise(ends)]


def ranks_from_environment(environment: Mapping[str, str] = os.environ) -> Ranks:
    """Return the ranks given by torchrun's environment variables; without these variables, this process is the only rank."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return Ranks()
    try:
        numbers = (int(environment[name]) for name in ("RANK", "WORLD_SIZE"))
        ranks = Ranks(*numbers, *(int(environment.get(name, default)) for name, default in LOCAL.items()))
    except KeyError as missing:
        unset = f"{missing.args[0]} is not set, but other rank variables are"
        raise ConfigError(f"{unset}; start ranks with torchrun") from None
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers: {error}") from None
    if not 0 <= ranks.rank < ranks.world_size:
        raise ConfigError(f"RANK={ranks.rank} must be at least 0 and less than WORLD_SIZE={ranks.world_size}")
    return ranks


def without_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without rank variables, for a process that is not a rank."""
    return {k: v for k, v in environment.items() if k not in RANK_VARIABLES and not k.startswith(RANK_PREFIXES)}
