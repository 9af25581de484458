"""A model trains the same whether its ranks hold replicas or shards, and its checkpoints move between all of them."""

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
import torch
import torch.distributed as dist
from torch_kit import make, rows_of, take

import ingot
from ingot.backends.torch.parallel import Parallel, choose
from ingot.config.schema import Config
from ingot.errors import ConfigError
from ingot.runtime.ranks import Ranks

PROGRAM = Path(__file__).with_name("parallel_program.py")
ALONE, DDP2, DDP3, FSDP2, FSDP4, HSDP4 = (1, "auto"), (2, "ddp"), (3, "ddp"), (2, "fsdp"), (4, "fsdp"), (4, "hsdp")
TOPOLOGIES = [DDP2, DDP3, FSDP2, FSDP4, HSDP4]
KINDS = list(itertools.product(("gpt2", "llama", "golf", "frontier"), ("adamw", "muon")))


def run(topology: tuple[int, str], cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run cases on ranks of this machine; for HSDP, it counts as two machines."""
    world_size, kind = topology
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(Path(ingot.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    per_node = world_size // (2 if kind == "hsdp" else 1)
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(per_node)}
    if world_size > 1:
        environment["WORLD_SIZE"] = str(world_size)
    cases = [{"parallel": kind, **case} for case in cases]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(cases)],
            env={**environment, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if world_size > 1 else {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(world_size)
    ]
    ended = [rank.communicate(timeout=900) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), b"\n".join(err for _, err in ended).decode()[-6000:]
    found: list[dict[str, Any]] = json.loads(ended[0][0])
    return found


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    return run(ALONE, [{"family": family, "optimizer": optimizer, "steps": 20} for family, optimizer in KINDS])


@pytest.mark.parametrize(
    "topology",
    [FSDP2, *(pytest.param(topology, marks=pytest.mark.long) for topology in TOPOLOGIES if topology != FSDP2)],
    ids=lambda topology: f"{topology[1]}-{topology[0]}",
)
def test_every_family_and_optimizer_trains_the_same_in_every_topology(topology, alone):
    cases = [{"family": family, "optimizer": optimizer, "steps": 20} for family, optimizer in KINDS]
    for kind, one, many in zip(KINDS, alone, run(topology, cases), strict=True):
        assert many["losses"] == pytest.approx(one["losses"], abs=1e-5), kind
        assert many["norms"] == pytest.approx(one["norms"], rel=1e-3), kind
        assert many["score"] == pytest.approx(one["score"], rel=1e-5), kind
        assert many["text"] == one["text"], kind
        assert many["equal"], kind


@pytest.mark.parametrize(
    ("kinds", "everywhere"),
    [
        ([("frontier", "muon")], [ALONE, DDP2, FSDP2]),
        pytest.param([("frontier", "muon"), ("gpt2", "adamw")], [ALONE, *TOPOLOGIES], marks=pytest.mark.long),
    ],
    ids=["some", "all"],
)
def test_a_checkpoint_of_any_topology_loads_in_any_other(kinds, everywhere, tmp_path):
    cases = [{"family": family, "optimizer": optimizer, "steps": 3} for family, optimizer in kinds]
    unbroken = run(ALONE, [{**case, "steps": 6} for case in cases])
    places = {topology: tmp_path / f"{topology[1]}-{topology[0]}" for topology in everywhere}
    for topology, place in places.items():
        folders = [place / "-".join(kind) for kind in kinds]
        for folder in folders:
            folder.mkdir(parents=True)
        run(topology, [{**case, "save": str(folder)} for case, folder in zip(cases, folders, strict=True)])
        assert len(list((folders[0] / "step-00000003").glob("model*.safetensors"))) == {FSDP2: 2, FSDP4: 4, HSDP4: 2}.get(
            topology, 1
        )
    for target in everywhere:
        origins = [(case, place / "-".join(kind)) for case, kind in zip(cases, kinds, strict=True) for place in places.values()]
        resumed = run(target, [{**case, "first": 3, "load": str(folder / "step-00000003")} for case, folder in origins])
        for (_, folder), found, whole in zip(origins, resumed, [one for one in unbroken for _ in places], strict=True):
            assert found["losses"] == pytest.approx(whole["losses"][3:], abs=1e-5), (folder, target)
            assert found["score"] == pytest.approx(whole["score"], rel=1e-5), (folder, target)


def test_a_model_with_an_embedding_in_bf16_can_be_sharded():
    case = {"family": "golf-bf16", "optimizer": "muon", "steps": 3}
    [alone], [sharded] = run(ALONE, [case]), run(FSDP2, [case])
    assert sharded["losses"] == pytest.approx(alone["losses"], abs=2e-3) and sharded["equal"]


def test_a_model_is_sharded_only_if_a_replica_does_not_fit():
    config = Config(training={"max_steps": 1}, model={"layers": 2, "heads": 2, "width": 64})
    assert choose(config, 300, 1 << 30, Ranks(0, 1)) == ("none", "")
    assert choose(config, 300, 1 << 30, Ranks(0, 4)) == ("ddp", "")
    assert choose(config, 300, 1 << 20, Ranks(0, 4, 0, 4))[0] == "fsdp"
    kind, why = choose(config, 300, 1 << 20, Ranks(0, 4, 0, 2))
    assert kind == "hsdp" and "GiB" in why


def test_with_offloading_everything_but_the_sharded_weights_is_on_the_device(monkeypatch):
    monkeypatch.setattr(Parallel, "shard", lambda self, model: model)
    block = torch.nn.BatchNorm1d(4)  # has weights and buffers
    block.gain = torch.nn.Parameter(torch.ones(()))
    Parallel("fsdp", Ranks(), torch.device("meta"), offloads=True).place(torch.nn.Sequential(block))
    devices = {name: t.device.type for name, t in block.state_dict(keep_vars=True).items()}
    assert {name for name, device in devices.items() if device == "cpu"} == {"weight", "bias"}


@pytest.mark.parametrize("changed", [{"training": {"parallel": "ddp"}}, {"optimizer": {"name": "muon"}}])
def test_offloading_is_refused_where_it_would_do_nothing_or_fail(changed):
    settings = {"training": {"parallel": "fsdp"}, "optimizer": {"name": "adamw"}, **changed}
    settings["training"] = {"max_steps": 1, "cpu_offload": True, **settings["training"]}
    with pytest.raises(ConfigError):
        choose(Config(**settings), 300, 1 << 30, Ranks(0, 2))


def test_a_sharded_model_trains_on_after_a_trial_that_ran_out_of_memory():
    def fail(*_):
        raise torch.OutOfMemoryError

    try:
        expected, backend = take(make(parallel="fsdp"), 2), make(parallel="fsdp")
        hook = backend.model.blocks[1].mlp.register_full_backward_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            backend._try(rows_of(0))
        hook.remove()
        assert [(r.loss, r.grad_norm) for r in take(backend, 2)] == [(r.loss, r.grad_norm) for r in expected]
    finally:
        dist.destroy_process_group()
