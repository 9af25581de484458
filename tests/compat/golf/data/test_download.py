import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hub_server import HubServer, serving
from hypothesis import given
from hypothesis import strategies as st

import ingot
from ingot.compat.golf.data_check import listed_counts
from ingot.compat.golf.download import dataset_name, download, plan_files
from ingot.data.hub import FileInfo, Hub
from ingot.data.store.shards import HEADER_INTS, MAGIC, VERSION
from ingot.errors import ConfigError, DataError

ROOT = Path(ingot.__file__).parents[2]
REPO = "owner/golf"
SETS = "datasets/fineweb10B_sp1024"
TRAIN, VAL = f"{SETS}/fineweb_train_{{:06d}}.bin", f"{SETS}/fineweb_val_000000.bin"
MODEL, VOCAB = "tokenizers/t.model", "tokenizers/t.vocab"


def shard(tokens, seed=0):
    header = np.zeros(HEADER_INTS, "<i4")
    header[:3] = MAGIC, VERSION, tokens
    return header.tobytes() + np.random.default_rng(seed).integers(0, 1024, tokens).astype("<u2").tobytes()


def manifest(**changes):
    stats = {"files_train": 4, "files_val": 1, "tokens_train": 400, "tokens_val": 70}
    entry = {"name": "fineweb10B_sp1024", "tokenizer_name": "t", "stats": stats}
    return {"datasets": [entry], "tokenizers": [{"name": "t", "model_path": MODEL, "vocab_path": VOCAB}], **changes}


def repository(prefix="datasets/", listed=None, seed=0):
    files = {TRAIN.format(i): shard(100, seed + i) for i in range(4)}
    files |= {VAL: shard(70, seed + 9), MODEL: b"model" * 9, VOCAB: b"vocab\n"}
    files |= {"docs_selected.jsonl": b'{"text": "a"}\n', "manifest.json": json.dumps(listed or manifest()).encode()}
    return {prefix + name: content for name, content in files.items()}


class Folder:
    """A hub with one repository, a cache, and a folder to download into."""

    def __init__(self, hub: HubServer, base: Path) -> None:
        self.hub, self.cache, self.path = hub, base / "cache", base / "data"
        self.files = repository()
        self.commit = hub.commit(REPO, self.files)
        self.lines: list[str] = []

    def __call__(self, **request):
        given = {"train_shards": 2, "notify": self.lines.append, **request}
        asked = {"repo": REPO, "endpoint": self.hub.endpoint, "cache": self.cache}
        asked |= {name: given.pop(name) for name in asked.keys() & given.keys()}
        return SimpleNamespace(**download(self.path, Hub(**asked), **given))

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def names(self) -> set[str]:
        return {str(path.relative_to(self.path)) for path in self.path.rglob("*") if path.is_file()}

    def is_whole(self) -> bool:
        return all((self / name).read_bytes() == self.files[f"datasets/{name}"] for name in WANTED)

    def said(self, words: str) -> bool:
        return any(words in line for line in self.lines)


WANTED = (TRAIN.format(0), TRAIN.format(1), VAL, MODEL, VOCAB, "manifest.json")
OURS = {".download.lock"}


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """Neither the settings nor the token of whoever runs the tests count."""
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no token"))
    for name in ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "MATCHED_FINEWEB_REPO_ID", "MATCHED_FINEWEB_REMOTE_ROOT_PREFIX"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hub():
    with serving() as server:
        yield server


@pytest.fixture
def folder(hub, tmp_path):
    return Folder(hub, tmp_path)


def test_the_first_train_shards_all_of_validation_and_the_tokenizer_arrive(folder):
    result = folder()
    assert folder.names() == {*WANTED, *OURS}
    assert folder.is_whole()
    assert (result.train_shards, result.train_tokens, result.val_shards, result.val_tokens) == (2, 200, 1, 70)
    assert (result.files, result.fetched_files) == (5, 5)
    assert result.fetched_bytes == sum(len(folder.files[f"datasets/{name}"]) for name in WANTED[:-1])
    assert (result.repo, result.commit, result.dataset) == (REPO, folder.commit, str(folder / SETS))
    assert result.tokenizer == [str(folder / MODEL), str(folder / VOCAB)]


def test_without_a_number_all_train_shards_arrive_up_to_80(folder):
    assert folder(train_shards=None).train_shards == 4


def test_no_train_shards_are_still_all_of_validation(folder):
    result = folder(train_shards=0)
    assert folder.names() == {VAL, MODEL, VOCAB, "manifest.json", *OURS}
    assert (result.train_tokens, result.val_tokens) == (0, 70)


@pytest.mark.parametrize("variant", ["foo", "", "sp", "byte", "byte261", "sp1024/../x", "SP1024", "sp1024\n", "sp1_.."])
def test_an_unknown_variant_is_refused_before_anything_is_asked(folder, variant):
    with pytest.raises(ConfigError, match="unknown variant"):
        folder(variant=variant)
    assert not folder.hub.requests


@pytest.mark.parametrize("variant", ["sp1024", "sp8192", "byte260", "sp8192_lossless_caps_caseops_v1_reserved"])
def test_a_variant_names_its_data_set(variant):
    assert dataset_name(variant) == f"fineweb10B_{variant}"


def test_more_shards_than_there_are_are_refused_with_the_number_there_is(folder):
    with pytest.raises(ConfigError, match=f"sp1024 has 4 train shards in {REPO}, fewer than the 9,999 requested"):
        folder(train_shards=9999)
    assert not folder.path.exists()


def test_a_data_set_that_is_not_listed_is_named_with_those_that_are(folder):
    with pytest.raises(DataError, match=f"no dataset fineweb10B_byte260 in the manifest of {REPO}; it lists fineweb10B_sp1024"):
        folder(variant="byte260")


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (manifest(tokenizers=[]), "no tokenizer t in"),
        (manifest(tokenizers=[{"name": "t"}]), "names None as a tokenizer file"),
        (manifest(datasets={}), "no dataset"),
        (manifest(datasets=[{"name": "fineweb10B_sp1024"}]), "does not say how many shards"),
        ([], "not a manifest"),
    ],
)
def test_a_manifest_that_lacks_something_is_refused(folder, listed, said):
    folder.hub.commit(REPO, {**repository(), "datasets/manifest.json": json.dumps(listed).encode()})
    with pytest.raises(DataError, match=said):
        folder()
    assert not folder.path.exists()


HOSTILE = [
    "../../etc/passwd", "/etc/passwd", "tokenizers/../../x", "tokenizers/../manifest.json", "cached_challenge_fineweb.py",
    "tokenizers", "tokenizers/", "tokenizers//x", "tokenizers/./x", "C:\\x", "tokenizers\\..\\x", "tokenizers/.x",
    "tokenizers/a\x00", 7,
]  # fmt: skip


@pytest.mark.parametrize("path", HOSTILE)
def test_a_manifest_cannot_write_outside_the_folder_of_tokenizers(folder, path):
    listed = manifest(tokenizers=[{"name": "t", "model_path": path}])
    folder.hub.commit(REPO, repository(listed=listed))
    with pytest.raises(DataError, match="not inside tokenizers/"):
        folder()
    assert not folder.path.exists()


@given(st.lists(st.sampled_from(["..", ".", "", "tokenizers", "a", "/", "\\", "a.model", "~", "c:"]), max_size=5).map("/".join))
def test_whatever_a_tokenizers_path_is_it_stays_inside(path):
    try:
        plan = plan_files(manifest(tokenizers=[{"name": "t", "model_path": path, "vocab_path": MODEL}]), "sp1024", 1, REPO)
    except DataError:
        return
    for name in plan.tokenizer:
        assert os.path.normpath(f"/data/{name}") == f"/data/{name}"
        assert name.startswith("tokenizers/")


def test_a_file_that_is_listed_and_absent_is_named_before_anything_is_fetched(folder):
    files = repository()
    del files[f"datasets/{VAL}"], files[f"datasets/{TRAIN.format(1)}"]
    folder.hub.commit(REPO, files)
    with pytest.raises(DataError, match=f"{REPO} lacks 2 of 5 files that its manifest lists, such as datasets/{VAL}"):
        folder()
    assert not folder.hub.asked("GET", ".bin")
    assert not folder.path.exists()


def test_a_repository_may_keep_its_manifest_at_the_top(folder):
    folder.hub.commit("owner/flat", repository(prefix=""))
    folder(repo="owner/flat", prefix="")
    assert folder.is_whole()


def test_a_wrong_prefix_is_named(folder):
    with pytest.raises(DataError, match=r"has no elsewhere/manifest.json; check the repository and the prefix 'elsewhere'"):
        folder(prefix="elsewhere")


def test_files_that_are_there_are_not_fetched_again(folder):
    folder()
    before = {name: (folder / name).stat().st_mtime_ns for name in WANTED}
    folder.hub.requests.clear()
    for cache in (folder.cache, folder.path.parent / "another cache"):  # the second is compared by its hash
        result = folder(cache=cache, train_shards=2)
        assert (result.files, result.fetched_files, result.fetched_bytes) == (5, 0, 0)
    assert {name: (folder / name).stat().st_mtime_ns for name in WANTED} == before
    assert not folder.hub.asked("GET", ".bin")


def test_more_shards_later_fetch_only_those(folder):
    folder(train_shards=1)
    result = folder(train_shards=3)
    assert result.fetched_files == 2
    assert folder.is_whole()


def test_a_file_damaged_together_with_the_cache_is_fetched_from_the_hub(folder):
    folder()
    with (folder / VAL).open("r+b") as file:  # the same content as in the cache, under two names
        file.truncate(100)
    folder.hub.requests.clear()
    assert folder().fetched_files == 1
    assert folder.is_whole()
    assert len(folder.hub.asked("GET", VAL)) == 1


def test_a_link_that_leads_nowhere_is_replaced(folder):
    (folder / SETS).mkdir(parents=True)
    (folder / VAL).symlink_to(folder / "gone")
    folder()
    assert folder.is_whole()
    assert not (folder / VAL).is_symlink()


def test_a_file_is_a_second_name_for_what_the_cache_has(folder):
    folder()
    blobs = {path.stat().st_ino for path in (folder.cache / "datasets--owner--golf/blobs").iterdir()}
    assert (folder / VAL).stat().st_ino in blobs


def test_on_another_disk_a_file_is_a_copy(folder, tmp_path):
    other = Path("/dev/shm")
    if not os.access(other, os.W_OK) or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("one disk only")
    import tempfile

    with tempfile.TemporaryDirectory(dir=other) as cache:
        folder(cache=Path(cache))
    assert folder.is_whole()
    assert folder.names() == {*WANTED, *OURS}


def test_what_arrives_damaged_is_fetched_once_more(folder):
    folder.hub.fail(VAL, flip=True)
    folder()
    assert folder.is_whole()
    assert len(folder.hub.asked("GET", VAL)) == 2


def test_it_gives_up_with_one_sentence_and_a_second_run_continues(folder):
    fault = folder.hub.fail(VAL, status=400, times=99)
    with pytest.raises(DataError, match=rf"gave up on datasets/{VAL} of {REPO} at http\S+: .*400.*; run the same command"):
        folder()
    assert folder.names() == {MODEL, VOCAB, "manifest.json", *OURS}
    fault.times = 0
    assert folder().fetched_files == 3
    assert folder.is_whole()


def test_what_always_arrives_damaged_is_refused_and_leaves_nothing(folder):
    folder.hub.fail(VAL, flip=True, times=99)
    with pytest.raises(DataError, match=f"datasets/{VAL} of {REPO} was damaged in transfer: .*hash"):
        folder()
    assert folder.names() == {MODEL, VOCAB, "manifest.json", *OURS}


def test_a_hub_out_of_reach_is_named(folder):
    with pytest.raises(DataError, match=rf"gave up on the file list of {REPO} at http://127.0.0.1:9: \S+"):
        folder(endpoint="http://127.0.0.1:9")
    assert not folder.path.exists()


@pytest.mark.parametrize(("gated", "status"), [(False, 401), (True, 403)])
def test_a_closed_repository_says_how_to_get_in(folder, gated, status):
    folder.hub.token, folder.hub.gated = "secret", gated
    with pytest.raises(DataError, match=rf"no access to dataset repository {REPO} at \S+ \(HTTP {status}\).*HF_TOKEN"):
        folder()
    assert len(folder.hub.requests) == 1


def test_a_token_opens_a_repository_and_stays_with_the_hub(folder, monkeypatch):
    folder.hub.token = "secret"
    monkeypatch.setenv("HF_TOKEN", "secret")
    folder()
    assert folder.is_whole()
    assert {request.token for request in folder.hub.requests if request.path.startswith("/cdn/")} == {None}


def test_a_repository_or_revision_that_is_not_there_is_named(folder):
    with pytest.raises(DataError, match="no access to dataset repository owner/gone"):
        folder(repo="owner/gone")
    with pytest.raises(DataError, match=f"{REPO} at .* has no such revision"):
        folder(revision="v9")


def test_a_revision_pins_every_file(folder):
    folder.hub.commit(REPO, repository(seed=50))
    folder(revision=folder.commit)
    assert folder.is_whole()


def test_a_changed_repository_replaces_shards_and_the_manifest(folder):
    folder()
    folder.files = {**repository(listed=manifest(version=2), seed=50)}
    folder.hub.commit(REPO, folder.files)
    assert folder().fetched_files == 3
    assert folder.is_whole()


def test_damaged_shards_are_fetched_again_and_a_tokenizer_of_ones_own_is_not_overwritten(folder):
    folder()
    (folder / VAL).unlink()
    (folder / VAL).write_bytes(shard(70, 1))  # of the same size
    assert folder().fetched_files == 1
    assert folder.is_whole()
    assert folder.said(f"{folder / VAL} differs from the file in {REPO}")
    (folder / MODEL).unlink()
    (folder / MODEL).write_text("mine")
    with pytest.raises(DataError, match="differs from"):
        folder()
    assert (folder / MODEL).read_text() == "mine"


def test_a_file_that_the_cache_has_under_this_name_is_not_hashed_again(folder, monkeypatch):
    folder()
    hashed = []
    monkeypatch.setattr(FileInfo, "problem", lambda info, path: hashed.append(path.name))
    assert folder().fetched_files == 0
    assert hashed == ["manifest.json"]


def test_a_data_set_of_ones_own_is_not_overwritten(folder):
    (folder / SETS).mkdir(parents=True)
    for name in ("dataset.json", "fineweb_train_000000.bin"):
        (folder / SETS / name).write_text("mine")
    with pytest.raises(DataError, match="so a download does not overwrite it; choose another output"):
        folder()
    assert folder.names() == {f"{SETS}/dataset.json", TRAIN.format(0), ".download.lock"}
    assert (folder / TRAIN.format(0)).read_text() == "mine"


def test_a_refused_request_leaves_the_manifest_as_it_was(folder):
    folder()
    folder.hub.commit("other/golf", repository(listed=manifest(version=2)))
    with pytest.raises(ConfigError):
        folder(repo="other/golf", train_shards=5)
    assert folder.is_whole()


@pytest.mark.parametrize("request_", [{"train_shards": -1}, {"prefix": "../x"}, {"repo": "no name"}, {"skip_manifest": True}])
def test_a_malformed_request_is_refused_and_makes_no_folder(folder, request_):
    with pytest.raises((ConfigError, DataError)):
        folder(**request_)
    assert not folder.path.exists()


def test_a_manifest_in_the_folder_is_used_as_it_is(folder):
    folder()
    own = folder / "manifest.json"
    own.write_bytes(own.read_bytes() + b"\n")
    (folder / VAL).unlink()
    assert folder(skip_manifest=True).fetched_files == 1
    assert own.read_bytes().endswith(b"\n") and folder.said(f"using {own} as it is")


def test_documents_come_when_asked_for(folder):
    assert not (folder / "docs_selected.jsonl").exists()
    folder(with_docs=True)
    assert (folder / "docs_selected.jsonl").read_bytes() == b'{"text": "a"}\n'


def test_a_lock_file_that_is_a_link_is_refused_by_name(folder, tmp_path):
    folder.path.mkdir(parents=True)
    (tmp_path / "mine").write_text("mine")
    (folder / ".download.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(DataError, match=r"\.download\.lock is a symbolic link.*another output"):
        folder()
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_shard_of_another_data_set_in_the_folder_is_refused(folder):
    folder()
    (folder / TRAIN.format(3)).write_bytes(shard(100, 99))
    with pytest.raises(DataError, match=rf"{TRAIN.format(3)} differs from {REPO} at {folder.commit[:12]}.*move it elsewhere"):
        folder()


def test_shards_of_an_earlier_larger_download_stay_and_are_mentioned(folder):
    folder(train_shards=4)
    result = folder(train_shards=1)
    [said] = result.warnings
    assert said.startswith(f"{SETS} ") and "4 train shards" in said and "training reads all" in said


def test_an_output_that_cannot_be_a_folder_is_named(folder):
    folder.path.write_text("a file")
    with pytest.raises(DataError, match=f"cannot write {folder.path}"):
        folder()


PROGRAM = "import sys, typer; from ingot.cli.data import download_command; "
PROGRAM += "from ingot.cli import main; main.app.command('get')(download_command); main.run(['get', *sys.argv[1:]])"


def start(folder, *words, script=None, before=None, **environment):
    home = {"HF_HOME": str(folder.path.parent / "home"), "HF_HUB_CACHE": str(folder.cache)}
    known = {**home, "HF_ENDPOINT": folder.hub.endpoint, "PYTHONPATH": str(ROOT / "src")}
    program = [str(script)] if script else ["-c", PROGRAM]
    if not script:
        words = ("--output", str(folder.path), *words)
    return subprocess.Popen(
        [sys.executable, *program, *words],
        env={**os.environ, **known, "MATCHED_FINEWEB_REPO_ID": REPO, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def golf_script(folder):
    folder.path.mkdir(exist_ok=True)
    script = folder / "cached_challenge_fineweb.py"
    script.write_text((ROOT / "data/cached_challenge_fineweb.py").read_text())
    return script


def test_the_golf_script_fills_its_own_folder_and_a_bare_number_counts_most(folder):
    folder.hub.commit("other/golf", repository(prefix="deep/root/"))
    known = {"MATCHED_FINEWEB_REPO_ID": "other/golf", "MATCHED_FINEWEB_REMOTE_ROOT_PREFIX": "deep/root"}
    words = ("2", "--train-shards", "80", "--variant", "sp1024")
    code, out, err = finish(start(folder, *words, script=golf_script(folder), **known))
    assert (code, folder.is_whole()) == (0, True), err
    assert f"{folder / SETS}: 2 train shards of 200 tokens\n{folder / SETS}: 1 validation shard of 70 tokens\n" in out
    assert out.endswith(f"train on it with: ingot train --recipe demo --data.path {folder / SETS}\n")


def test_the_golf_script_says_a_mistake_in_one_line_and_its_exit_code(folder):
    code, out, err = finish(start(folder, script=golf_script(folder)))
    assert (code, out) == (2, "")
    assert err == f"cached_challenge_fineweb.py: error: sp1024 has 4 train shards in {REPO}, fewer than the 80 requested\n"


def test_offline_uses_what_is_here_and_says_what_is_not(folder):
    folder()
    folder.hub.requests.clear()
    code, _, err = finish(start(folder, "--train-shards", "2", HF_HUB_OFFLINE="1"))
    assert code == 0, err
    code, _, err = finish(start(folder, "--train-shards", "3", HF_HUB_OFFLINE="1"))
    assert code == 3
    assert f"HF_HUB_OFFLINE is set and datasets/{TRAIN.format(2)} of {REPO} is not in the hub's cache" in err
    assert not folder.hub.requests


def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(folder):
    folder.files[f"datasets/{VAL}"] = shard(70_000)
    folder.hub.commit(REPO, folder.files)
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # noqa: E731
    code, out, err = finish(start(folder, "--train-shards", "2", before=limit))
    assert (code, out) == (3, "")
    assert "error: cannot read or write" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert folder.names() == {MODEL, VOCAB, "manifest.json", *OURS}
    assert not list(folder.cache.rglob("*.incomplete"))


def test_a_second_download_waits_for_the_first_and_fetches_nothing_twice(folder, eventually):
    fault = folder.hub.fail(VAL, pause=threading.Event())
    first = start(folder, "--train-shards", "2", "--json")
    eventually(lambda: bool(folder.hub.asked("GET", VAL)))
    second = threading.Thread(target=folder, daemon=True)
    second.start()
    eventually(lambda: folder.said("another download into"))
    fault.pause.set()
    second.join(300)
    code, out, err = finish(first)
    assert code == 0, err
    assert json.loads(out)["fetched_files"] == 5
    assert folder.is_whole()
    assert len(folder.hub.asked("GET", VAL)) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_an_ended_download_leaves_whole_files_only_and_goes_on(folder, eventually, number, code):
    fault = folder.hub.fail(VAL, pause=threading.Event())
    process = start(folder, "--train-shards", "2")
    eventually(lambda: bool(folder.hub.asked("GET", VAL)))
    process.send_signal(number)
    ended, _, err = finish(process)
    assert (ended, "Traceback" in err) == (code, False)
    assert VAL not in folder.names() and {MODEL, VOCAB} <= folder.names()
    fault.pause.set()
    assert folder().fetched_files == 3
    assert folder.is_whole()


def test_the_commands_load_no_client_before_they_run():
    script = "import sys, ingot.cli.data; "
    script += "print([name for name in ('huggingface_hub', 'numpy', 'torch') if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert result.stdout == "[]\n"


def test_a_tokenizer_that_is_not_the_data_sets_is_refused_by_the_manifest(folder):
    folder()
    assert listed_counts(folder / SETS, folder / MODEL)["files_train"] == 4  # of which 2 are there
    with pytest.raises(
        DataError, match=r"made with the tokenizer t.model according to \S+manifest.json, not TOKENIZER_PATH=other.model"
    ):
        listed_counts(folder / SETS, Path("other.model"))
    (folder / TRAIN.format(7)).write_bytes(shard(1))
    for index in (2, 3):
        (folder / TRAIN.format(index)).write_bytes(shard(1))
    with pytest.raises(DataError, match=r"has 5 train shards, but .* lists 4"):
        listed_counts(folder / SETS, folder / MODEL)


def test_a_data_set_without_a_manifest_or_not_in_it_has_any_tokenizer(folder, tmp_path):
    assert listed_counts(tmp_path / "datasets/mine", Path("any.model")) == {}
    folder()
    assert listed_counts(folder / "datasets/mine", Path("any.model")) == {}
