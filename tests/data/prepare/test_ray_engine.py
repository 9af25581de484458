import json
import sys

import pytest

from ingot.data.prepare import blocks as cutting
from ingot.data.prepare import pipeline as prepare_module
from ingot.data.prepare.pipeline import prepare
from ingot.data.prepare.workers import ray_engine
from ingot.data.tokenizers import ByteTokenizer
from ingot.errors import ConfigError, DataError

# A list of texts that kills the first process that reads it, as a machine that fails would.
FATAL = """
(lambda os, mark, texts: texts if os.path.exists(mark) else (open(mark, "w").close(), os.kill(os.getpid(), 9)))(
    __import__("os"), {mark!r}, {texts!r}
)
"""


class Fatal(list):
    def __init__(self, texts, mark):
        super().__init__(texts)
        self.code = FATAL.strip().format(mark=str(mark), texts=list(self))

    def __reduce__(self):
        return eval, (self.code,)


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "in.jsonl"
    texts = [f"Document {number}: {'the cat is soft. ' * (number % 9)}" for number in range(300)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_cluster_gives_the_same_bytes_and_runs_no_file_of_the_current_folder(tmp_path, corpus, monkeypatch, capsys):
    ray = pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setattr(cutting, "BLOCK_BYTES", 1000)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    prepare([corpus], tmp_path / "local", "gpt2", shard_tokens=1000)
    read, mark = prepare_module.read_blocks, tmp_path / "killed"
    here = tmp_path / "here"  # the current folder, no file of which may run
    here.mkdir()
    monkeypatch.chdir(here)
    for name in ("numpy", "random", "pydantic_core", "tiktoken"):
        (here / f"{name}.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")

    def blocks(*inputs):
        for number, block in enumerate(read(*inputs)):
            yield Fatal([text.decode() for text in cutting.texts_of(block)[0]], mark) if number == 7 else block

    with ray_engine(ByteTokenizer(), None, 2):  # once for both, because it takes seconds to start
        with monkeypatch.context() as patch:
            patch.setattr(prepare_module, "read_blocks", blocks)
            prepare([corpus], tmp_path / "cluster", "gpt2", shard_tokens=1000, engine="ray")
        assert mark.exists()
        assert contents(tmp_path / "cluster") == contents(tmp_path / "local")
        corpus.write_text(corpus.read_text() + "{\n")
        with pytest.raises(DataError, match=r"in\.jsonl:301: not JSON"):
            prepare([corpus], tmp_path / "wrong", "byte", engine="ray")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster", "here", "in.jsonl", "killed", "local"]
    assert not (here / "ran").exists()
    assert capsys.readouterr().out == ""
    assert not ray.is_initialized()


def test_a_missing_ray_is_told_before_anything_is_written(tmp_path, corpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'ingot-lm\[ray\]'"):
        prepare([corpus], tmp_path / "out", "byte", engine="ray")
    assert list(tmp_path.iterdir()) == [corpus]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nowhere.invalid:6379", "nonsense"])
def test_a_cluster_that_does_not_answer_is_one_line(address):
    pytest.importorskip("ray", reason="ray is not installed")
    told = pytest.raises(ConfigError, match=rf"no Ray cluster answers at {address} .*leave --ray-address out")
    with told as caught, ray_engine(ByteTokenizer(), address, None):
        pass
    assert "\n" not in str(caught.value)
