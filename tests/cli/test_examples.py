"""examples/: a run that is killed, evicted or stopped goes on by itself, with the real `ingot` and stand-ins for schedulers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from programs import DEMO, Ingot, losses, state
from schedulers import PATIENCE, Cluster, at_step, killed, run, run_job, told_to_end

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def cluster(tmp_path: Path, ingot: Ingot) -> Cluster:
    return Cluster(tmp_path / "cluster", {**ingot.environment, "PAUSE": "0"})


@pytest.fixture
def settings(data: Path, tmp_path: Path):
    """Writes the file of settings; a run without an end in sight is given one when it shall complete."""

    def write(max_steps: int = 1_000_000, **more: object) -> Path:
        path = tmp_path / "config" / "config.yaml"
        path.parent.mkdir(exist_ok=True)
        values = {**DEMO, "data.path": str(data), "training.max_steps": max_steps, "training.save_every": 2, **more}
        values |= {
            "training.keep_every": 0,
            "optimizer.schedule": "constant",
            "evaluation.at_end": False,
            "artifact.write": False,
        }
        path.write_text("base: demo\n" + yaml.safe_dump({"tracking.heartbeat_seconds": 0.1, **values, "budget.seconds": None}))
        return path

    return write


def test_a_chain_of_slurm_jobs_goes_on_after_a_kill_and_a_stop_and_ends_with_the_run(cluster: Cluster, settings, tmp_path):
    folder = tmp_path / "long"
    named = {"RUN": str(folder), "CONFIG": str(settings())}
    cluster.submit(EXAMPLES / "slurm-chain.sh", "--tracking.log_every", 1)
    assert cluster.run_next(at_step(folder, 4, killed), **named) != 0  # the node is lost
    first = state(folder)["step"]
    assert cluster.run_next(at_step(folder, first + 4, told_to_end), **named) == 75
    assert (state(folder)["status"], state(folder)["stop_reason"]) == ("stopped", "signal:SIGTERM")
    settings(max_steps=state(folder)["step"] + 3)
    assert cluster.run_next(**named) == 0 and state(folder)["status"] == "completed"
    assert cluster.run_next(**named) is None and len(losses(folder)) == state(folder)["step"]


def test_a_chain_of_slurm_jobs_ends_where_repeating_cannot_help(cluster: Cluster, settings, tmp_path):
    named = {"RUN": str(tmp_path / "long"), "CONFIG": str(settings(**{"model.heads": 7}))}
    cluster.submit(EXAMPLES / "slurm-chain.sh")
    assert cluster.run_next(**named) == 2 and cluster.run_next(**named) is None


@pytest.mark.long
def test_a_chain_of_slurm_jobs_ends_when_somebody_asks_the_run_to_stop(cluster: Cluster, settings, tmp_path):
    folder = tmp_path / "long"
    named = {"RUN": str(folder), "CONFIG": str(settings())}

    def ask(process: object) -> None:
        subprocess.run(["ingot", "stop", str(folder)], env=cluster.environment, check=True, stdout=subprocess.DEVNULL)

    cluster.submit(EXAMPLES / "slurm-chain.sh")
    assert cluster.run_next(at_step(folder, 2, ask), **named) == 75
    assert state(folder)["stop_reason"] == "stop_file" and cluster.run_next(**named) is None


@pytest.mark.long
def test_a_kubernetes_job_replaces_a_pod_that_was_stopped_and_is_complete_with_the_run(cluster: Cluster, settings, tmp_path):
    folder, config = tmp_path / "runs" / "long", settings()
    mounts = {"/runs": tmp_path / "runs", "/config": config.parent, "/data": tmp_path}
    ended: list[int] = []

    def evicted(process: subprocess.Popen[bytes]) -> None:
        told_to_end(process)
        process.wait(PATIENCE)
        ended.append(state(folder)["step"])
        settings(max_steps=ended[0] + 3)

    pods = [at_step(folder, 4, evicted), None, None]
    assert run_job(EXAMPLES / "kubernetes-job.yaml", mounts, {"GPUS": "1"}, cluster, pods) == "Complete"
    assert state(folder)["step"] == ended[0] + 3 and list(losses(folder)) == list(range(1, ended[0] + 4))


def test_a_kubernetes_job_with_wrong_settings_fails_at_once(cluster: Cluster, settings, tmp_path):
    mounts = {"/runs": tmp_path / "runs", "/config": settings(**{"model.heads": 7}).parent}
    assert run_job(EXAMPLES / "kubernetes-job.yaml", mounts, {"GPUS": "1"}, cluster, [None, None]) == "Failed"


def test_the_pod_trains_with_all_its_gpus_and_its_runs_outlive_it():
    spec = yaml.safe_load((EXAMPLES / "kubernetes-job.yaml").read_text())["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert int(container["env"][0]["value"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    command = container["command"]
    assert command[command.index("--nproc-per-node") + 1] == "$(GPUS)"
    kept = {volume["name"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume}
    folder = command[command.index("--training.output_dir") + 1]
    [mount] = [mount for mount in container["volumeMounts"] if folder.startswith(mount["mountPath"])]
    assert mount["name"] in kept


@pytest.mark.long
def test_the_loop_goes_on_after_a_kill_and_ends_with_the_run(cluster: Cluster, settings, tmp_path):
    folder, config = tmp_path / "long", settings()

    def kill_the_session(process: subprocess.Popen[bytes]) -> None:
        settings(max_steps=state(folder)["step"] + 200)
        subprocess.run(["kill", "-KILL", str(state(folder)["pid"])], check=True)

    named = {**cluster.environment, "RUN": str(folder), "CONFIG": str(config)}
    assert run(["bash", str(EXAMPLES / "loop.sh")], named, cluster.folder, at_step(folder, 4, kill_the_session)) == 0
    assert state(folder)["status"] == "completed"
    assert len(json.loads((folder / "environment.json").read_text())["earlier"]) == 1


@pytest.mark.long
def test_the_loop_ends_when_somebody_stops_the_run(cluster: Cluster, settings, tmp_path):
    folder, config = tmp_path / "long", settings()

    def stop(process: object) -> None:
        subprocess.run(["kill", "-TERM", str(state(folder)["pid"])], check=True)

    named = {**cluster.environment, "RUN": str(folder), "CONFIG": str(config)}
    assert run(["bash", str(EXAMPLES / "loop.sh")], named, cluster.folder, at_step(folder, 2, stop)) == 75
    assert state(folder)["stop_reason"] == "signal:SIGTERM"
