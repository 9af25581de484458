"""Runs and prepared data at URLs: on a local S3 server if moto is installed, and always in a folder with a file:// URL."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from programs import DEMO, Ingot, checkpoints, losses, one_line, outcome, train_words

import ingot as package
from ingot.config.schema import TrainingSection
from ingot.data.loading.data_path import open_dataset
from ingot.errors import CheckpointError, ConfigError, DataError
from ingot.runs.checkpoints import load_checkpoint
from ingot.runs.folder import saved_steps
from ingot.runs.mirror import RunMirror, local_run
from ingot.runtime.files import user_path
from ingot.runtime.remote import local_path

Machine = Callable[[str], Path]


@dataclass
class Store:
    """A bucket: its URL, and what a program needs to reach it."""

    url: str
    environment: dict[str, str]

    def put(self, folder: Path, name: str) -> str:
        """Upload a folder without using the code under test."""
        for file in filter(Path.is_file, folder.rglob("*")):
            self.write(f"{name}/{file.relative_to(folder).as_posix()}", file.read_bytes())
        return f"{self.url}/{name}"

    def write(self, name: str, content: bytes) -> None:
        with fsspec.open(f"{self.url}/{name}", "wb", **({"auto_mkdir": True} if self.url.startswith("file") else {})) as file:
            file.write(content)

    def files(self, name: str) -> set[str]:
        fs, root = fsspec.url_to_fs(f"{self.url}/{name}")
        fs.invalidate_cache()
        return {path[len(root) + 1 :] for path in fs.find(root)}

    def remove(self, name: str) -> None:
        fs, path = fsspec.url_to_fs(f"{self.url}/{name}")
        fs.rm_file(path)


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    pytest.importorskip("s3fs", reason="s3:// URLs need the extra `remote`")
    server = pytest.importorskip("moto.server", reason="the local S3 server needs moto[server]").ThreadedMotoServer(
        "127.0.0.1", 0
    )
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "file":
        return Store(f"file://{tmp_path}/bucket", {})
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    environment = {**keys, "AWS_ENDPOINT_URL": request.getfixturevalue("s3")}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{os.urandom(4).hex()}"
    fsspec.filesystem("s3").mkdir(bucket)
    return Store(f"s3://{bucket}", environment)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make this process one on another machine, with an empty cache folder."""

    def use(name: str) -> Path:
        monkeypatch.setenv("INGOT_CACHE", str(tmp_path / name))
        return tmp_path / name

    use("first")
    return use


def test_a_killed_run_continues_on_another_machine_with_the_same_losses(
    store: Store, ingot: Ingot, data: Path, reference: Path, machine: Machine, eventually: Callable[..., None]
):
    url, second = f"{store.url}/run", machine("second")
    words = train_words(store.put(data, "data"), url)
    first = ingot.start(*words, INGOT_CACHE=str(second.with_name("first")), **store.environment)
    eventually(lambda: any(name.endswith("checkpoint.json") for name in store.files("run")))
    first.kill()
    again = ingot(*words, INGOT_CACHE=str(second), **store.environment)
    assert "resumed_at step" in again.stderr
    run = local_path(url)
    assert run.is_relative_to(second)
    assert losses(run) == losses(reference) and outcome(run) == outcome(reference)
    assert {f"checkpoints/{path.name}/checkpoint.json" for path in checkpoints(run).values()} <= store.files("run")
    assert {"config.yaml", "metrics.jsonl", "result.json", "artifact/model.safetensors"} <= store.files("run")


def test_a_run_at_a_url_generates_and_resumes_by_its_url(store: Store, ingot: Ingot, reference: Path, tmp_path: Path):
    url, cache = store.put(reference, "run"), str(tmp_path / "other")
    ingot("generate", url, "--tokens", 5, INGOT_CACHE=cache, **store.environment)
    done = ingot("train", url, "--training.max_steps", 44, INGOT_CACHE=cache, **store.environment)
    assert "resumed_at step 40" in done.stderr
    assert "checkpoints/step-00000044/checkpoint.json" in store.files("run")
    fetched = ingot("train", "--resume", url, "--training.max_steps", 44, INGOT_CACHE=f"{cache}-2", **store.environment)
    assert "is complete" in fetched.stderr


def test_a_run_that_starts_from_a_run_at_a_url_resumes_on_another_machine(
    ingot: Ingot, data: Path, reference: Path, tmp_path: Path
):
    store = Store(f"file://{tmp_path}/bucket", {})
    settings = {"training__resume": store.put(reference, "run"), "training__max_steps": 44}
    words = train_words(data, f"{store.url}/copy", **settings)
    first = ingot(*words, INGOT_CACHE=str(tmp_path / "first"))
    assert "starting from the state of" in first.stderr and "resumed_at step 40" in first.stderr
    shutil.rmtree(tmp_path / "bucket/copy/checkpoints/step-00000044")
    again = ingot(*words, INGOT_CACHE=str(tmp_path / "second"))
    assert "starting from" not in again.stderr and "resumed_at step 40" in again.stderr


def test_a_url_that_holds_another_run_than_its_staging_folder_is_refused(
    ingot: Ingot, data: Path, reference: Path, tmp_path: Path, machine: Machine
):
    store = Store(f"file://{tmp_path}/bucket", {})
    url = store.put(reference, "run")
    first, second = machine("first"), tmp_path / "second"
    local_run(url)
    shutil.rmtree(tmp_path / "bucket/run")
    ingot(*train_words(data, url, training__seed=99), INGOT_CACHE=str(second))
    index = tmp_path / "bucket/run/checkpoints/step-00000040/checkpoint.json"
    before = index.read_bytes()
    refused = ingot("train", url, "--training.max_steps", 44, INGOT_CACHE=str(first), code=4)
    assert "holds another run than its staging folder" in one_line(refused) and index.read_bytes() == before
    with pytest.raises(CheckpointError, match="holds another run"):
        RunMirror(url, local_path(url), TrainingSection()).sync()
    assert index.read_bytes() == before


def test_a_truncated_remote_checkpoint_is_refused(store: Store, ingot: Ingot, reference: Path, tmp_path: Path):
    url, name = store.put(reference, "run"), "checkpoints/step-00000040/model.safetensors"
    store.write(f"run/{name}", (reference / name).read_bytes()[:-100])
    refused = ingot("train", url, code=4, INGOT_CACHE=str(tmp_path / "other"), **store.environment)
    assert f"{url}/{name} is damaged: its checksum does not match" in one_line(refused)


def test_an_incomplete_upload_is_not_a_checkpoint_and_the_next_copy_completes_it(store: Store, reference: Path, machine: Machine):
    url, name = store.put(reference, "run"), "checkpoints/step-00000040/checkpoint.json"
    store.remove(f"run/{name}")
    assert max(saved_steps(local_run(url) / "checkpoints")) == 36
    store.write("run/checkpoints/step-00000099.partial/checkpoint.json", b"{}")  # copied from a folder in which a save was killed
    RunMirror(url, reference, TrainingSection(max_steps=40, keep_last=None)).sync()
    machine("second")
    assert load_checkpoint(local_run(url) / "checkpoints" / "step-00000040").step == 40


def test_a_copy_interrupted_anywhere_leaves_only_valid_checkpoints(
    reference: Path, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    run, url, put = tmp_path / "run", f"file://{tmp_path}/bucket/run", LocalFileSystem.put_file
    shutil.copytree(reference, run, ignore=shutil.ignore_patterns("step-000000[0-2]*"))
    mirror, left = RunMirror(url, run, TrainingSection(max_steps=40)), 0

    def failing(self: LocalFileSystem, source: str, target: str, **how: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            if not target.endswith("checkpoint.json"):  # object storage writes a file whole or not at all, but others may not
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                Path(target).write_bytes(b"half")
            raise ConnectionError("the network is down")
        put(self, source, target, **how)

    complete = []
    for budget in range(40):
        left = budget
        with monkeypatch.context() as patched:
            patched.setattr(LocalFileSystem, "put_file", failing)
            try:
                mirror.sync()
            except CheckpointError as error:
                assert "the network is down" in str(error)
        machine(f"machine-{budget}")
        complete += [load_checkpoint(path).step for path in saved_steps(local_run(url) / "checkpoints").values()]
        if left >= 0:
            break
    assert left >= 0 and complete == sorted(complete) and complete[-1] == 40


def test_old_checkpoints_but_no_milestones_are_deleted_at_the_url(reference: Path, tmp_path: Path, machine: Machine):
    store = Store(f"file://{tmp_path}/bucket", {})
    url = store.put(reference, "run")
    folder = local_run(url)
    assert list(saved_steps(folder / "checkpoints")) == [40]
    RunMirror(url, folder, TrainingSection(max_steps=40, keep_last=1, keep_every=16)).sync()
    best = load_checkpoint(folder / "checkpoints" / "step-00000040").progress["best_step"]
    kept = {int(name[17:25]) for name in store.files("run") if name.startswith("checkpoints/")}
    assert kept == {16, 32, 36, 40} | ({best} - {None})


def test_a_run_that_cannot_be_uploaded_says_so_and_the_same_command_uploads_it(
    data: Path,
    tmp_path: Path,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    store, put = Store(f"file://{tmp_path}/bucket", {}), LocalFileSystem.put_file
    settings = {**DEMO, "training.max_steps": 8, "data.path": str(data), "training.output_dir": f"{store.url}/run"}
    config: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        config.setdefault(section, {})[key] = {"null": None, "false": False}.get(str(value), value)

    def failing(self: LocalFileSystem, source: str, target: str, **how: Any) -> None:
        if "checkpoints" in target:
            raise ConnectionError("the network is down")
        put(self, source, target, **how)

    with monkeypatch.context() as patched:
        patched.setattr(LocalFileSystem, "put_file", failing)
        with pytest.raises(CheckpointError, match=r"cannot write file://.*: the network is down"):
            package.train(config, recipe="demo")
    assert "the network is down; check the URL" in (said := capsys.readouterr().err) and "the next save tries again" in said
    assert not any(name.endswith("checkpoint.json") for name in store.files("run"))
    assert package.train(config, recipe="demo").status == "completed"
    assert json.loads(Path(tmp_path / "bucket/run/result.json").read_text())["total_steps"] == 8
    assert "checkpoints/step-00000008/checkpoint.json" in store.files("run")


def test_prepared_data_at_a_url_is_downloaded_once_and_verified(store: Store, data: Path, machine: Machine):
    url = store.put(data, "data")
    dataset = open_dataset(url)
    assert dataset.fingerprint == open_dataset(str(data)).fingerprint and dataset.folder == local_path(url)
    shard = dataset.split("train").paths[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    damaged = store.put(data, "damaged")
    store.write(f"damaged/{shard.name}", bytes(content))
    with pytest.raises(DataError, match="is damaged: its checksum does not match"):
        open_dataset(damaged)
    with pytest.raises(DataError, match=r"has no dataset\.json; upload a folder"):
        open_dataset(f"{store.url}/nothing")


def test_storage_that_cannot_be_reached_is_one_clear_sentence(s3: str, ingot: Ingot, data: Path):
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT_URL": s3}
    refused = ingot(*train_words(data, Path("x"), training__output_dir="s3://no-such-bucket/run"), code=4, **keys)
    assert "cannot list s3://no-such-bucket/run: The specified bucket does not exist" in one_line(refused)
    keys = {**dict.fromkeys(keys, ""), "AWS_EC2_METADATA_DISABLED": "true", "HOME": "/nonexistent"}
    refused = ingot(*train_words(data, Path("x"), data__path="s3://bucket/data"), code=3, **keys)
    assert "credentials" in one_line(refused)


def test_urls_are_refused_where_a_path_is_needed(ingot: Ingot, data: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"s3://bucket/model\.py is a URL, but only training\.output_dir"):
        user_path("s3://bucket/model.py")
    refused = ingot(*train_words(data, Path("x"), training__output_dir="nowhere://bucket/run"), code=2)
    assert "Protocol not known: nowhere" in one_line(refused)
    url = f"file://{tmp_path}/run"
    refused = ingot(*train_words(data, Path("x"), training__output_dir=url), "--force", code=2)
    assert "--force cannot delete files at a URL" in one_line(refused)
    assert "is a URL" in one_line(
        ingot("sweep", "--recipe", "demo", "-o", url, "--vary", "optimizer.learning_rate=0.1,0.2", code=2)
    )
