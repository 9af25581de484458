"""Blocks encoded by a Ray cluster.

The driver reads the text and writes the folder; tasks of the cluster parse and encode. What a task returns depends on its block
alone, so Ray may run it again elsewhere when the process or the machine that had it is gone, and the bytes are the same.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import lru_cache
from importlib import import_module
from typing import Any, cast

from ingot.data.prepare.blocks import Block, encode_or_explain
from ingot.data.prepare.workers import BLOCKS_AHEAD, Engine, in_order
from ingot.data.store.writer import Encoded
from ingot.data.tokenizers import Tokenizer, from_spec
from ingot.errors import ConfigError, IngotError, RunError
from ingot.runtime.children import away_from_the_users_folder, cpu_count

RETRIES = 10  # of a task whose process or machine is gone
PATIENCE_SECONDS = 10
LOCAL = "local"  # Ray's word for a cluster of this machine, made for one run


@contextmanager
def ray_engine(tokenizer: Tokenizer, address: str | None, workers: int | None) -> Iterator[Engine]:
    """An engine of tasks on the cluster at `address`; without one, on that of RAY_ADDRESS or else on this machine.

    `workers`: how many processes this machine has for it, or how many tasks a cluster may get at once; by default as many as
    there are processors, and on a cluster enough to keep them busy.
    """
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise ConfigError("--engine ray needs the package ray; install it with: pip install 'ingot-lm[ray]'") from None
    with ExitStack() as undo:
        undo.enter_context(redirect_stdout(sys.stderr))  # what Ray says of the cluster is not a result
        address = address or os.environ.get("RAY_ADDRESS") or LOCAL
        if not ray.is_initialized():
            _connect(ray, address, workers)
            undo.callback(ray.shutdown)
        task = ray.remote(max_retries=RETRIES)(_encode)
        spec = ray.put(json.dumps(tokenizer.spec()))
        busy = BLOCKS_AHEAD * (1 + int(ray.cluster_resources().get("CPU", 1)))
        ahead = busy if address == LOCAL else workers or busy

        def finish(begun: Any) -> Encoded:
            try:
                found = ray.get(begun)
            except ray.exceptions.RayError as error:
                reason = " ".join(str(error).strip().splitlines()[-1:])[:300]
                raise RunError(f"ray could not encode: {reason}; every machine of the cluster needs this ingot") from None
            if isinstance(found, IngotError):
                raise found
            return cast(Encoded, found)

        yield lambda blocks: in_order(blocks, lambda block: task.remote(spec, block), finish, ahead)


def _connect(ray: Any, address: str, workers: int | None) -> None:
    own = {"num_cpus": workers or cpu_count(), "include_dashboard": False} if address == LOCAL else {}
    try:
        if named := re.fullmatch(r"(?:ray://)?(.+):(\d+)", address):  # Ray itself would try for many minutes
            socket.create_connection((named[1], int(named[2])), timeout=PATIENCE_SECONDS).close()
        with warnings.catch_warnings(), away_from_the_users_folder():
            warnings.simplefilter("ignore")  # of changes in versions to come
            ray.init(address, logging_level="ERROR", log_to_driver=False, **own)
    except (OSError, ValueError, RuntimeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"no Ray cluster answers at {address} ({reason}); start one with `ray start --head`, set RAY_AUTH_MODE=token if a "
            "token guards it (from Ray 2.59 on), or leave --ray-address out to use this machine"
        ) from None


def _encode(spec: str, block: Block) -> Encoded | IngotError:
    return encode_or_explain(_open(spec), block)


@lru_cache(maxsize=1)
def _open(spec: str) -> Tokenizer:
    return from_spec(json.loads(spec))
