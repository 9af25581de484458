import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_tokenizers import toy_sentencepiece

import ingot
from ingot.data.prepare import blocks as cutting
from ingot.data.prepare import workers as encoding
from ingot.data.prepare.blocks import Lines, encode_block, read_blocks, text_blocks
from ingot.data.prepare.workers import in_order, local_engine, workers_for
from ingot.data.text.text_files import read_documents
from ingot.data.tokenizers import ByteTokenizer
from ingot.errors import DataError, RunError

TEXTS = [f"document {number}, with some text: {'x' * (number * 37 % 200)}" for number in range(100)]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(cutting, "BLOCK_BYTES", 500)
    monkeypatch.setattr(encoding, "BLOCK_BYTES", 500)


def jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def unpacked(blocks, tokenizer):
    """The documents that an engine gave."""
    found = []
    for encoded in blocks:
        found += np.split(encoded.ids, np.cumsum(encoded.tokens)[:-1]) if len(encoded.tokens) else []
    return [tokenizer.decode(ids) for ids in found]


def parsed(block):
    return block if isinstance(block, list) else [text.decode() for text in cutting.texts_of(block)[0]]


# Blocks


@pytest.mark.parametrize("size", [1, 10, 100, 10_000])
@pytest.mark.parametrize("head", ["", "\ufeff", "\n \n"])
@pytest.mark.parametrize("tail", ["", "\n", "\n\n\n"])
def test_blocks_of_lines_hold_every_document_once(tmp_path, monkeypatch, size, head, tail):
    monkeypatch.setattr(cutting, "BLOCK_BYTES", size)
    path = tmp_path / "in.jsonl"
    path.write_text(head + "\n\n".join(json.dumps({"text": text}) for text in ["a", "", "é" * 40, "\ufeff\n", "b"]) + tail)
    blocks = list(read_blocks([path], "text", lambda _: None))
    assert [text for block in blocks for text in parsed(block)] == list(filter(None, read_documents([path], "text")))
    assert b"".join(block.data for block in blocks) == path.read_bytes()


def test_files_of_all_sorts_keep_their_order(tmp_path, small_blocks):
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.csv").write_text("text\nsecond\n")
    jsonl(tmp_path / "c.jsonl", TEXTS)
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as file:
        file.write('{"text": "last but one"}\n')
    (tmp_path / "e.txt").write_text("last")
    paths = sorted(tmp_path.iterdir())
    found = [text for block in read_blocks(paths, "text", lambda _: None) for text in parsed(block)]
    assert found == ["first", "second", *TEXTS, "last but one", "last"]


@given(st.lists(st.text(max_size=30)), st.integers(1, 50))
def test_blocks_of_texts_hold_every_text_and_no_more_than_is_needed(texts, size):
    blocks = list(text_blocks(texts, size))
    assert [text for block in blocks for text in block] == texts
    assert all(sum(map(len, block[:-1])) < size for block in blocks)


MISTAKES = [b"\xff", b"{", b"{}", b'{"text": 1}', b'\xef\xbb\xbf{"text": "a"}']


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("before", [0, 1, 7, 50])
def test_a_mistake_has_its_place_in_the_file_whatever_block_it_is_in(tmp_path, small_blocks, mistake, before):
    path = tmp_path / "bad.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False).encode() for text in TEXTS[:before]]
    path.write_bytes(b"\n".join([*lines, b"", mistake, b'{"text": "b"}']))
    with pytest.raises(DataError) as expected:
        list(read_documents([path], "text"))
    with pytest.raises(DataError) as found:
        [encode_block(ByteTokenizer(), block) for block in read_blocks([path], "text", lambda _: None)]
    assert str(found.value) == str(expected.value)


def test_a_block_is_counted_document_by_document():
    texts = ["the  cats", "", "a", "é"]
    encoded = encode_block(toy_sentencepiece(), texts)
    assert encoded.tokens.sum() == len(encoded.ids)
    assert (encoded.bytes.tolist(), encoded.piece_bytes.tolist(), encoded.empty) == ([9, 1, 2], [8, 1, 2], 1)
    assert encode_block(ByteTokenizer(), texts).piece_bytes.tolist() == [9, 1, 2]
    assert encode_block(toy_sentencepiece(start="<start>"), ["a", " ", "a"]).piece_bytes.tolist() == [1, 0, 1]


def test_a_selection_has_the_ids_of_its_documents():
    encoded = encode_block(ByteTokenizer(), ["a", "bc", "d"])
    chosen = encoded.select(np.array([True, False, True]))
    assert unpacked([chosen], ByteTokenizer()) == ["a", "d"]
    assert (chosen.tokens.tolist(), chosen.bytes.tolist()) == ([2, 2], [1, 1])


# Engines


def test_other_processes_encode_only_what_takes_longer_than_to_hand_it_to_them(monkeypatch):
    monkeypatch.setattr(encoding, "cpu_count", lambda: 5)
    slow, instant = toy_sentencepiece(), ByteTokenizer()
    assert [workers_for(tokenizer, size) for tokenizer in (slow, instant) for size in (1000, 10**9)] == [1, 5, 1, 1]


@pytest.mark.parametrize("workers", [1, 3])
def test_documents_come_back_in_order_from_any_number_of_workers(tmp_path, small_blocks, workers):
    path = jsonl(tmp_path / "in.jsonl", TEXTS)
    with local_engine(ByteTokenizer(), workers) as encode:
        found = list(encode(read_blocks([path], "text", lambda _: None)))
    assert len(found) > 10
    assert unpacked(found, ByteTokenizer()) == TEXTS


@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_mistake_is_the_one_that_is_told(tmp_path, small_blocks, workers):
    good, bad = jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "b.jsonl"
    bad.write_text('{"text": 1}\n' + '{"text": "a"}\n' * 10 + "{\n")
    (tmp_path / "c.csv").write_text("other\nx\n")
    seen = []
    with pytest.raises(DataError, match=r"b\.jsonl:1: field"), local_engine(ByteTokenizer(), workers) as encode:
        for encoded in encode(read_blocks([good, bad, tmp_path / "c.csv"], "text", lambda _: None)):
            seen.append(encoded)
    assert unpacked(seen, ByteTokenizer()) == TEXTS


def test_reading_waits_for_writing():
    read, written, ahead = 0, 0, []

    def blocks():
        nonlocal read
        for _ in range(100):
            read += 1
            ahead.append(read - written)
            yield ["x"]

    for _ in in_order(blocks(), lambda block: SimpleNamespace(result=lambda: encode_block(ByteTokenizer(), block)), 5):
        written += 1
    assert (read, written, max(ahead)) == (100, 100, 5)


def test_large_documents_are_not_read_ahead(small_blocks):
    begun, most = 0, 0

    def finish(block):
        nonlocal begun
        begun -= 1
        return encode_block(ByteTokenizer(), block)

    def begin(block):
        nonlocal begun, most
        begun += 1
        most = max(most, begun)
        return SimpleNamespace(result=lambda: finish(block))

    list(in_order((["x" * 5000] for _ in range(20)), begin, 5))
    assert most == 1


@pytest.fixture
def started(monkeypatch):
    """The workers of an engine."""
    made = []

    class Worker(encoding._Worker):
        def __init__(self, spec):
            super().__init__(spec)
            made.append(self)

    monkeypatch.setattr(encoding, "_Worker", Worker)
    return made


class Bomb:
    """A block that ends the process that reads it."""

    data = b""

    def __reduce__(self):
        return os._exit, (1,)


def test_a_killed_worker_is_an_error_that_says_how_to_continue(started):
    told = pytest.raises(RunError, match=r"killed.*fewer --workers to continue")
    with told, local_engine(ByteTokenizer(), 2) as encode:
        list(encode([["a"], Bomb(), ["b"]]))
    assert all(worker._process.poll() is not None for worker in started)


def test_no_more_workers_are_started_than_blocks_wait_for(started):
    with local_engine(ByteTokenizer(), 40) as encode:
        assert len(list(encode(text_blocks(["a", "b"], 1)))) == 2
        assert 1 <= len(started) <= 2


def test_no_worker_outlives_its_engine(started):
    with pytest.raises(KeyboardInterrupt), local_engine(ByteTokenizer(), 2) as encode:
        for _ in encode(text_blocks(TEXTS, 10)):
            raise KeyboardInterrupt
    assert 1 <= len(started) <= 2
    assert all(worker._process.poll() is not None for worker in started)


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(ingot.__file__).parents[1])}


def test_no_worker_outlives_a_killed_program():
    script = """
import time
from ingot.data.prepare import workers as encoding
from ingot.data.tokenizers import ByteTokenizer
class Worker(encoding._Worker):
    def __init__(self, spec):
        super().__init__(spec)
        print(self._process.pid, flush=True)
encoding._Worker = Worker
with encoding.local_engine(ByteTokenizer(), 2) as encode:
    next(encode(["x"] for _ in range(1000)))
    print("working", flush=True)
    time.sleep(60)
"""
    program = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=ENVIRONMENT, text=True)
    workers = [int(program.stdout.readline()) for _ in range(2)]
    assert program.stdout.readline() == "working\n"
    program.kill()
    program.wait()
    program.stdout.close()
    deadline = time.monotonic() + 300
    while any(_is_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_is_alive(pid) for pid in workers)


def _is_alive(pid):
    status = Path(f"/proc/{pid}/status")
    if not Path("/proc/self").exists():
        pytest.skip("only Linux shows processes as files")
    try:
        return "State:\tZ" not in status.read_text()
    except OSError:
        return False


def test_a_script_needs_no_main_guard(tmp_path):
    jsonl(tmp_path / "in.jsonl", TEXTS)
    (tmp_path / "script.py").write_text(
        "from pathlib import Path\nfrom ingot.data.prepare.pipeline import prepare\nprint('once')\n"
        "prepare([Path('in.jsonl')], Path('out'), 'byte', workers=2)\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("once\n", "")


def test_workers_run_no_file_of_the_current_folder(tmp_path):
    jsonl(tmp_path / "in.jsonl", TEXTS)
    for name in ("json", "random", "numpy", "pickle", "tiktoken"):
        (tmp_path / f"{name}.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    program = "from ingot.data.prepare.pipeline import prepare; from pathlib import Path; "
    program += "import sys; sys.path.insert(0, ''); prepare([Path('in.jsonl')], Path('out'), 'byte', workers=2)"
    subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, env=ENVIRONMENT, check=True)
    assert (tmp_path / "out").is_dir() and not (tmp_path / "ran").exists()


def test_lines_know_what_came_before(tmp_path, small_blocks):
    path = jsonl(tmp_path / "in.jsonl", TEXTS)
    data = path.read_bytes()
    blocks = list(read_blocks([path], "text", lambda _: None))
    for block in blocks:
        assert isinstance(block, Lines)
        assert data[block.bytes_before :].startswith(block.data)
        assert data[: block.bytes_before].count(b"\n") == block.lines_before
