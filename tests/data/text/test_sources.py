import csv
import errno
import gzip
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import pytest
import zstandard
from hub_server import serving
from huggingface_hub import scan_cache_dir
from hypothesis import given
from hypothesis import strategies as st

import ingot
from ingot.data.hub import fetch, select
from ingot.data.text.text_files import commits, count_documents, file_bytes, find_files, kind_of, read_documents
from ingot.errors import ConfigError, DataError

PACK = {"gz": gzip.compress, "xz": lzma.compress, "zst": zstandard.ZstdCompressor(write_checksum=True).compress}
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def jsonl(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def put(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def read(path, field="text"):
    return list(read_documents([path], field))


def refused(path, field="text", error=DataError):
    with pytest.raises(error) as caught:
        read(path, field)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_linked_folders_are_searched_once_and_links_to_nowhere_are_told(tmp_path):
    for name in ("in/b/b.txt", "elsewhere/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        put(tmp_path / name, "text")
    for link, to in (("a.txt", "nowhere.txt"), ("b/up", ".."), ("linked", "../elsewhere"), ("twice", "../elsewhere")):
        (tmp_path / "in" / link).symlink_to(to)
    files, ignored = find_files([tmp_path / "in"])
    assert [path.relative_to(tmp_path / "in").as_posix() for path in files] == ["b/b.txt", "linked/c.txt"]
    assert ignored == [tmp_path / "in/a.txt"]


def test_the_commit_of_a_dataset_is_known_by_the_place_of_its_files():
    cached = Path("/cache/datasets--org--name/snapshots") / ("0a" * 20) / "data/a.parquet"
    assert commits([cached, Path("b.txt")]) == {"org/name": "0a" * 20}


def test_what_looks_like_a_dataset_of_the_hub_is_told_how_to_be_written():
    with pytest.raises(DataError, match=r"dataset on the hub.* hf:org/name$"):
        find_files([Path("org/name")])


def test_a_folder_is_searched_to_the_bottom_in_sorted_order(tmp_path):
    for name in ("b.txt", "a/z.jsonl", "a/b/c.TXT", "notes.rst", "a/x.bin", "c.json.gz", "d.bin.gz", "e.parquet.gz", "f.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    files, ignored = find_files([tmp_path])
    assert [f.relative_to(tmp_path).as_posix() for f in files] == ["a/b/c.TXT", "a/z.jsonl", "b.txt", "c.json.gz", "f.parquet"]
    assert [f.relative_to(tmp_path).as_posix() for f in ignored] == ["a/x.bin", "d.bin.gz", "e.parquet.gz", "notes.rst"]


def test_hidden_files_and_folders_are_passed_over_and_counted(tmp_path):
    for name in ("a.txt", ".b.txt", ".git/c.txt", "d/.e/f.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    files, ignored = find_files([tmp_path])
    assert (len(files), len(ignored)) == (1, 3)
    hidden = put(tmp_path / ".asked.txt", "x")
    assert find_files([hidden]) == ([hidden], [])


@pytest.mark.parametrize(
    "name", ["a.txt", "a.JSONL", "a.ndjson", "a.json", "a.csv", "a.tsv.gz", "a.txt.xz", "a.jsonl.zst", "a.parquet"]
)
def test_the_name_says_that_a_file_is_text(name):
    assert kind_of(Path(name))
    assert not kind_of(Path(name + ".bak"))


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path):
    for name in ("a.rst", "a.parquet.gz", "a.gz"):
        with pytest.raises(DataError, match=rf"cannot read .*{name}: expected \.txt, \.jsonl, .*\.parquet"):
            find_files([put(tmp_path / name, "x")])
    with pytest.raises(DataError, match=r"no input at .*gone.txt; give a file"):
        find_files([tmp_path / "gone.txt"])
    with pytest.raises(DataError, match="is empty"):
        find_files([put(tmp_path / "empty.txt", "")])


def test_text_is_taken_byte_for_byte(tmp_path):
    text = "\ufeffone\r\ntwo\rthree\n\x00\u2028é"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert read(tmp_path / "a.txt") == [text]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json"])
def test_a_line_of_jsonl_is_a_document_and_blank_lines_are_none(tmp_path, name):
    put(tmp_path / name, b'\xef\xbb\xbf{"text": "a\\nb"}\r\n\n  \n{"text": ""}\n{"text": "\\ud83d\\ude00"}')
    assert read(tmp_path / name) == ["a\nb", "", "😀"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_number_of_any_length_in_another_field_is_nothing_to_stop_at(tmp_path, name):
    put(tmp_path / name, f'{{"text": "a", "n": -{"9" * 5000}, "m": [{"1" * 4300}, 7]}}\n')
    assert read(tmp_path / name) == ["a"]


def test_another_text_field_can_be_named(tmp_path):
    assert read(jsonl(tmp_path / "a.jsonl", {"text": "no", "body": "yes"}), "body") == ["yes"]
    assert read(put(tmp_path / "a.csv", "id,body\n1,yes\n"), "body") == ["yes"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "b"', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("3", "expected a JSON object with a field 'text', found int"),
        ('{"body": 1, "id": 2}', "no field 'text'; fields found: 'body', 'id'; use --text-field"),
        ("{}", "no field 'text'; fields found: none"),
        ('{"text": 3}', "field 'text' is not a string but int"),
        ('{"text": null}', "field 'text' is null"),
        ('{"text": "\\ud800"}', "field 'text' contains an unpaired surrogate"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.xz"])
def test_a_bad_line_is_named_with_its_number(tmp_path, line, problem, name):
    contents = ('{"text": "a"}\n\n' + line + "\n").encode()
    put(tmp_path / name, lzma.compress(contents) if name.endswith("xz") else contents)
    assert refused(tmp_path / name).startswith(f"{tmp_path / name}:3: {problem}")


@pytest.mark.parametrize(
    ("name", "before"),
    [("a.txt", b"12345"), ("a.jsonl", b'{"text": "a"}\n"'), ("a.json", b'[\n "a",\n "'), ("a.csv", b"text\na\n")],
)
def test_invalid_utf8_is_named_with_its_offset_in_the_file(tmp_path, name, before):
    path = put(tmp_path / name, before + b"\xff\n")
    assert f"{name} is not UTF-8: byte 0xff at offset {len(before)};" in refused(path)
    path = put(tmp_path / f"{name}.gz", gzip.compress(before + b"\xc3"))
    assert f"{name}.gz is not UTF-8: byte 0xc3 at offset {len(before)};" in refused(path)


# JSON arrays


@given(st.lists(st.one_of(TEXT, TEXT.map(lambda t: {"text": t, "more": [1, {"a": None}]}))), st.sampled_from([None, 2]))
def test_every_element_of_an_array_is_a_document(tmp_path_factory, elements, indent):
    path = put(tmp_path_factory.mktemp("json") / "a.json", json.dumps(elements, indent=indent, ensure_ascii=False))
    assert read(path) == [e if isinstance(e, str) else e["text"] for e in elements]


def test_an_array_may_hold_any_text_and_other_fields(tmp_path):
    elements = ["é" * 50, {"text": 'a"\\\u2028', "n": [-1.5e300, True, None]}, "😀\n", "", {"text": "x" * 300}]
    for ascii_only in (True, False):
        path = put(tmp_path / "a.json", "\n " + json.dumps(elements, ensure_ascii=ascii_only) + "\n")
        assert read(path) == [e if isinstance(e, str) else e["text"] for e in elements]


def test_an_object_over_several_lines_is_a_document(tmp_path):
    assert read(put(tmp_path / "d.json", '["a"]\n\n"b" {"text": "c"}[]')) == ["a", "b", "c"]
    assert read(put(tmp_path / "a.json", '{\n "text": "a"\n}\n{"text":\n"b"}')) == ["a", "b"]
    assert read(put(tmp_path / "b.json", " \n")) == []
    assert read(put(tmp_path / "c.json", "[]")) == []


@pytest.mark.parametrize(
    ("contents", "line", "problem"),
    [
        ('["a",\n"b"', 1, "not JSON (Expecting ',' delimiter: line 2"),
        ('["a",\n"b', 1, "not JSON (Unterminated string starting at: line 2"),
        ('\n["a",\n\n3]', 2, "expected a JSON object with a field 'text', found int"),
        ('[\n"a"\n"b"]', 1, "not JSON (Expecting ',' delimiter: line 3"),
        ('["a"]\n\nb', 3, "not JSON (Expecting value"),
        ('["a",\n\n,"b"]', 1, "not JSON (Expecting value: line 3"),
        ('["a"]\n["a",\n"\\ud800"]', 2, "field 'text' contains an unpaired surrogate"),
        ("[" * 100_000, 1, "not JSON"),
    ],
)
def test_what_is_wrong_in_a_json_file_is_named_with_its_line(tmp_path, contents, line, problem):
    path = put(tmp_path / "a.json", contents)
    said = refused(path)
    assert said.startswith(f"{path}:{line}") and problem in said


@given(st.lists(st.tuples(TEXT, TEXT)), st.sampled_from([("csv", "excel"), ("tsv", "excel-tab"), ("csv", "unix")]))
def test_every_row_of_a_table_is_a_document(tmp_path_factory, rows, kind):
    file = io.StringIO(newline="")
    csv.writer(file, kind[1], quoting=csv.QUOTE_ALL).writerows([("id", "text"), *rows])
    path = put(tmp_path_factory.mktemp("table") / f"a.{kind[0]}", file.getvalue())
    assert read(path) == [text for _, text in rows]


def test_a_table_may_have_a_file_mark_blank_lines_and_long_fields(tmp_path):
    long = "x" * 200_000
    path = put(tmp_path / "a.csv", f'\ufefftext,n\r\n\r\n"a\r\n""b""",1\r\n{long},2')
    assert read(path) == ['a\r\n"b"', long]


@pytest.mark.parametrize(
    ("name", "contents", "line", "problem"),
    [
        ("a.csv", "body,id\nx,1\n", 1, "no column 'text'; columns found: 'body', 'id'; use --text-field"),
        ("a.csv", "text,text\nx,y\n", 1, "2 columns are named 'text'; keep one of them"),
        ("a.csv", "text,id\nx,1\n\ny,2,3\n", 4, "3 columns, but the first row names 2"),
        ("a.tsv", "text\tid\nx\n", 2, "1 columns, but the first row names 2"),
        ("a.csv", 'text,id\nx,1\n"y,2\nz,3\n', 4, "malformed row (unexpected end of data)"),
        ("a.csv", 'text,id\n"x"y,1\n', 2, "malformed row"),
    ],
)
def test_what_is_wrong_in_a_table_is_named_with_its_line(tmp_path, name, contents, line, problem):
    path = put(tmp_path / name, contents)
    assert refused(path).startswith(f"{path}:{line}: {problem}")


# Compression


@given(st.binary(max_size=2000), st.sampled_from(list(PACK)), st.integers(1, 3), st.integers(0, 8))
def test_a_compressed_file_is_what_was_compressed(tmp_path_factory, data, codec, streams, padding):
    text = data.decode("latin-1")
    packed = PACK[codec](text.encode()) * streams + bytes(4 * padding if codec != "zst" else 0)
    assert read(put(tmp_path_factory.mktemp("packed") / f"a.txt.{codec}", packed)) == [text * streams]


@pytest.mark.parametrize("codec", PACK)
def test_a_compressed_file_that_is_cut_anywhere_is_refused(tmp_path, codec):
    packed = PACK[codec](b'{"text": "abc"}\n' * 3)
    for end in range(len(packed)):
        path = put(tmp_path / f"a.jsonl.{codec}", packed[:end])
        assert f"is cut short: the end of its .{codec} stream is missing" in refused(path)


@pytest.mark.parametrize("codec", PACK)
def test_a_compressed_file_with_damage_or_something_behind_it_is_refused(tmp_path, codec):
    packed = PACK[codec](os.urandom(50_000).hex().encode())
    for damaged in (packed + b"more", b"plain text", packed[:30_000] + b"\0\0\0\0" + packed[30_004:]):
        said = refused(put(tmp_path / f"a.txt.{codec}", damaged))
        assert "is damaged (" in said or "is cut short" in said


def test_zst_frames_with_large_windows_checksums_and_skippable_ones_are_read(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=30, write_checksum=True, enable_ldm=True)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compress(b"a" * 300_000)
    skippable = (0x184D2A50).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"notes"
    assert read(put(tmp_path / "a.txt.zst", skippable + frame + skippable + frame)) == ["a" * 600_000]


def test_a_file_that_unpacks_to_more_than_the_memory_is_read_in_pieces(tmp_path):
    path = put(tmp_path / "a.jsonl.zst", PACK["zst"]((b'{"text": "' + b"a" * 1_000_000 + b'"}\n') * 180))
    program = (
        "import resource, sys; from pathlib import Path; from ingot.data.text.text_files import read_documents\n"
        "resource.setrlimit(resource.RLIMIT_AS, (150 << 20,) * 2)\n"
        "print(sum(map(len, read_documents([Path(sys.argv[1])], 'text'))))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(ingot.__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, env=environment, timeout=300)
    assert (result.stdout, result.returncode) == ("180000000\n", 0), result.stderr


def test_without_zstandard_a_zst_file_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = put(tmp_path / "a.txt.zst", PACK["zst"](b"a"))
    assert refused(path, error=ConfigError).endswith("needs the package zstandard; pip install 'ingot-lm[zst]'")


# Progress and counting


def test_progress_adds_up_to_the_size_of_the_files(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    jsonl(tmp_path / "b.jsonl", {"text": "a"}, {"text": ""})
    put(tmp_path / "c.json", '["a"]  ')
    put(tmp_path / "d.csv", "text\na\n")
    for codec, pack in PACK.items():
        put(tmp_path / f"e.txt.{codec}", pack(os.urandom(200_000).hex().encode()))
    seen = []
    files, _ = find_files([tmp_path])
    list(read_documents(files, "text", seen.append))
    assert sum(seen) == sum(map(file_bytes, files))
    assert len(seen) > 2 * len(PACK)


def test_counting_leaves_out_empty_documents_and_stops_at_the_limit(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n{"text": ""}\n{"text": "b"}\n')
    (tmp_path / "d.jsonl").write_text("not read any more")
    files, _ = find_files([tmp_path])
    assert count_documents(files, "text", 3) == 3
    assert count_documents(files[:3], "text", 99) == 3
    put(tmp_path / "e.txt.gz", gzip.compress(b""))
    put(tmp_path / "f.txt.gz", gzip.compress(b"a"))
    assert count_documents([tmp_path / "e.txt.gz", tmp_path / "f.txt.gz"], "text", 99) == 1


# Parquet


def parquet(path, texts, rows_per_group=3, name="text"):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    from pyarrow import parquet

    table = pyarrow.table({"id": list(range(len(texts))), name: texts})
    parquet.write_table(table, path, row_group_size=rows_per_group)
    return path


def test_every_row_of_a_parquet_file_is_a_document(tmp_path):
    texts = [f"{i}\r\né" * i for i in range(1000)]
    path = parquet(tmp_path / "a.parquet", texts, 300)
    seen = []
    assert list(read_documents([path], "text", seen.append)) == texts
    assert (sum(seen), len(seen)) == (file_bytes(path), 4)
    assert count_documents([path], "text", 5) == 5
    assert read(parquet(tmp_path / "b.parquet", ["x"], name="body"), "body") == ["x"]


def test_what_is_wrong_in_a_parquet_file_is_named(tmp_path):
    path = parquet(tmp_path / "a.parquet", ["a", "b", None])
    assert refused(path).startswith(f"{path}, row 3: field 'text' is null")
    assert "no column 'body'; columns found: 'id', 'text'" in refused(path, "body")
    whole = path.read_bytes()
    for damaged in (b"", b"PAR1", whole[:-20], whole[: len(whole) // 2]):
        assert "is not a parquet file, or it is damaged" in refused(put(path, damaged))


def test_without_pyarrow_a_parquet_file_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = put(tmp_path / "a.parquet", "PAR1")
    assert refused(path, error=ConfigError).endswith("needs the package pyarrow; pip install 'ingot-lm[parquet]'")


# Datasets on the hub: which files they are, and the real client against a server of our own

CARD = [
    {"config_name": "sample-10BT", "data_files": [{"split": "train", "path": "sample/10BT/*"}]},
    {"config_name": "default", "data_files": [{"split": "train", "path": ["data/*/*", "extra/**/*.parquet"]}]},
    {"config_name": "eval", "data_dir": "eval"},
]
FILES = ["data/CC-1/0.parquet", "data/CC-2/0.parquet", "sample/10BT/1.parquet", "sample/10BT/0.parquet", "extra/x/y/0.parquet"]
FILES += ["eval/train-0.parquet", "eval/test-0.parquet", "eval/sub/validation-0.parquet"]


@pytest.mark.parametrize(
    ("config", "split", "chosen"),
    [
        (None, "train", ["data/CC-1/0.parquet", "data/CC-2/0.parquet", "extra/x/y/0.parquet"]),
        ("sample-10BT", "train", ["sample/10BT/0.parquet", "sample/10BT/1.parquet"]),
        ("eval", "train", ["eval/train-0.parquet"]),
        ("eval", "val", ["eval/sub/validation-0.parquet"]),
    ],
)
def test_the_card_of_a_dataset_says_which_files_it_has(config, split, chosen):
    assert select(FILES, CARD, config, split, "hf:o/n") == chosen


@pytest.mark.parametrize(
    ("files", "config", "split", "chosen"),
    [
        (["data/train-0-of-2.parquet", "data/train-1-of-2.parquet", "data/test-0.parquet"], None, "train", [0, 1]),
        (["b.parquet", "a.parquet"], None, "train", [1, 0]),
        (["en/train/0.parquet", "fr/train/0.parquet", "fr/dev/0.parquet"], "fr", "validation", [2]),
        (["all/my_split-0.parquet", "x/my_split/0.parquet"], None, "my_split", [1]),
    ],
)
def test_without_a_card_the_names_of_files_say_it(files, config, split, chosen):
    assert select(files, [], config, split, "hf:o/n") == [files[number] for number in chosen]


@pytest.mark.parametrize(
    ("files", "configs", "config", "split", "problem"),
    [
        (FILES, CARD, "gone", "train", "no configuration 'gone'; choose one of sample-10BT, default, eval"),
        (FILES, CARD[::2], None, "train", "hf:o/n has several configurations; name one after a slash: sample-10BT, eval"),
        (FILES, CARD, None, "test", "no parquet files for the split 'test'"),
        (["en/0.parquet"], [], "fr", "train", "no parquet files in a folder 'fr'; folders with parquet files: en"),
        (["d/partial-train/0.parquet"], [], None, "train", "only part of the dataset as parquet (d/partial-train/0.parquet)"),
    ],
)
def test_a_dataset_without_what_was_asked_says_what_it_has(files, configs, config, split, problem):
    with pytest.raises(DataError) as caught:
        select(files, configs, config, split, "hf:o/n")
    assert problem in str(caught.value)


@pytest.fixture
def ask(tmp_path):
    """What a process of its own, as the client reads its settings once, finds after each name."""
    program = (
        "import sys, time; time.sleep = lambda seconds: None\n"
        "from pathlib import Path; from ingot.data.text.text_files import find_files; from ingot.errors import IngotError\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(*(path.read_text() for path in find_files([Path(name)])[0]))\n"
        "    except IngotError as error: print(type(error).__name__, error)"
    )

    def call(endpoint, *names, **variables):
        given = {"HF_HOME": str(tmp_path / "hub"), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "", **variables}
        environment = {**os.environ, "PYTHONPATH": str(Path(ingot.__file__).parents[1]), **given}
        command = [sys.executable, "-c", program, *names]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    return call


def test_a_dataset_on_the_hub_is_its_parquet_files(ask):
    with serving() as hub:
        files = {f"data/{split}-{n}.parquet": f"{split}{n}".encode() for split in ("train", "test") for n in (1, 0)}
        hub.commit("org/name", {**files, "README.md": b"", "data/train.txt": b"no"})
        hub.commit("org/text", {"a.txt": b"x"})
        names = (
            "hf:org/name",
            "hf:org/name:test",
            "hf:org/name/data:test",
            "hf:org/text",
            "hf:org/gone",
            "hf:org/name:no",
            "hf:!",
        )
        said = ask(hub.endpoint, *names)
        assert said[:3] == ["train0 train1", "test0 test1", "test0 test1"]
        assert said[3].startswith("DataError hf:org/text ") and "text files" in said[3]
        assert "DataError" in said[4] and f"org/gone at {hub.endpoint} (HTTP 404); check" in said[4]
        assert said[5].startswith("DataError hf:org/name:no: ") and "choose" in said[5]
        assert said[6].startswith("ConfigError hf:! ") and "hf:ORG/NAME" in said[6]


def test_what_was_fetched_once_is_there_without_the_hub(ask, tmp_path):
    with serving() as hub:
        hub.commit("org/name", {f"data/{split}-0.parquet": split.encode() for split in ("train", "test")})
        assert ask(hub.endpoint, "hf:org/name") == ["train"]
        assert ask(hub.endpoint, "hf:org/name", HF_HUB_OFFLINE="1") == ["train"]
    assert ask("http://127.0.0.1:9", "hf:org/name") == ["train"]
    (said,) = ask("http://127.0.0.1:9", "hf:org/name:test", HF_HUB_OFFLINE="1")  # which was never fetched
    assert said.startswith("DataError cannot fetch hf:org/name:test: HF_HUB_OFFLINE is set")
    next((tmp_path / "hub").rglob("snapshots/*/data/train-0.parquet")).unlink()
    (said,) = ask("http://127.0.0.1:9", "hf:org/name")
    assert said.startswith("DataError cannot fetch hf:org/name: ") and "http://127.0.0.1:9" in said


def test_files_that_did_not_arrive_are_not_taken_for_there(ask, tmp_path):
    with serving() as hub:
        commit = hub.commit("org/name", {f"data/{split}-0.parquet": split.encode() for split in ("train", "test")})
        assert ask(hub.endpoint, "hf:org/name") == ["train"]
        for listing in (tmp_path / "hub").rglob(f"trees/{commit}*"):  # without which the client cannot tell what is missing
            listing.unlink()
        hub.fail(commit, status=500, times=99)
        (said,) = ask(hub.endpoint, "hf:org/name:test")
        assert said.startswith("DataError cannot fetch hf:org/name:test: data/test-0.parquet of org/name was not"), said


def test_what_a_name_stood_for_is_noted_in_the_hubs_cache_wherever_that_is(ask, tmp_path):
    cached = {"HF_HUB_CACHE": str(tmp_path / "cache")}
    with serving() as hub:
        hub.commit("org/name", {"data/train-0.parquet": b"train"})
        assert ask(hub.endpoint, "hf:org/name", **cached) == ["train"]
    assert ask("http://127.0.0.1:9", "hf:org/name", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "other"), **cached) == ["train"]
    cache = scan_cache_dir(tmp_path / "cache")
    assert (cache.warnings, [repo.nb_files for repo in cache.repos]) == ([], [1])


@pytest.fixture
def fetched(tmp_path, monkeypatch):
    """A file that was fetched before, in the cache of a client that finds the same on the hub."""
    file = tmp_path / f"datasets--org--name/snapshots/{'1' * 40}/train.parquet"
    file.parent.mkdir(parents=True)
    file.touch()
    info = SimpleNamespace(
        sha="1" * 40, siblings=[SimpleNamespace(rfilename="train.parquet", lfs=None, size=0, blob_id=None)], card_data=None
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: info)
    monkeypatch.setattr("ingot.data.hub.snapshot_download", lambda *_, **__: str(file.parent))
    monkeypatch.setattr("ingot.data.hub.connect", lambda endpoint: None)
    assert fetch("hf:org/name") == [file]
    return file


def fail(monkeypatch, what: str, error: Exception) -> None:
    def call(*_, **__):
        raise error

    monkeypatch.setattr(what, call)


def test_files_fetched_before_are_used_with_the_reason_why(fetched, monkeypatch, caplog):
    fail(monkeypatch, "huggingface_hub.HfApi.dataset_info", ConnectionError("no route"))
    assert fetch("hf:org/name") == [fetched]
    assert "no route; run the same command to resume; " in caplog.text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_disk_that_refuses_is_not_hidden_by_files_fetched_before(fetched, monkeypatch, number):
    fail(monkeypatch, "ingot.data.hub.snapshot_download", OSError(number, os.strerror(number), "/disk/blob"))
    with pytest.raises(DataError, match=f"cannot read or write /disk/blob: {os.strerror(number)}; free some disk space"):
        fetch("hf:org/name")


@pytest.mark.parametrize("error", [DataError("no such split"), ZeroDivisionError()])
def test_what_goes_wrong_in_choosing_files_is_not_hidden_by_files_fetched_before(fetched, monkeypatch, error):
    fail(monkeypatch, "ingot.data.hub.select", error)
    with pytest.raises(type(error)):
        fetch("hf:org/name")


@pytest.mark.parametrize("note", ["", "3", '{"revision": "1"}', '{"revision": "1", "files": [3]}', '{"files": []}'])
def test_a_damaged_note_is_none(fetched, monkeypatch, note):
    next(fetched.parents[2].glob(".ingot/*.json")).write_text(note)
    fail(monkeypatch, "huggingface_hub.HfApi.dataset_info", ConnectionError("no route"))
    with pytest.raises(DataError, match=r"cannot fetch hf:org/name: .* no route"):
        fetch("hf:org/name")


def test_a_cache_that_is_only_read_gives_its_files(fetched):
    shutil.rmtree(fetched.parents[2] / ".ingot")
    (fetched.parents[2] / ".ingot").touch()
    assert fetch("hf:org/name") == [fetched]


def test_a_hub_that_cannot_be_reached_is_one_line(ask):
    (said,) = ask("http://127.0.0.1:9", "hf:org/name")
    assert said.startswith("DataError cannot fetch hf:org/name: ") and "http://127.0.0.1:9" in said
    (said,) = ask("http://127.0.0.1:9", "hf:org/name", HF_HUB_OFFLINE="1")
    assert said.startswith("DataError cannot fetch hf:org/name: HF_HUB_OFFLINE is set")
    assert said.endswith("give parquet files as input")


class CardHub(BaseHTTPRequestHandler):
    """A hub whose first repository has a card, and whose second has only the copy that hubs make."""

    def do_GET(self):
        path = unquote(self.path).partition("?")[0]
        if "/tree/" in path:
            sha = path.rpartition("/tree/")[2]
            names = {"1": ["a/0.parquet", "b/0.parquet"], "3": ["default/train/0000.parquet"]}[sha[0]]
            tree = [{"type": "file", "path": name, "oid": name, "size": len(f"{sha}/{name}")} for name in names]
            self.send({"Content-Type": "application/json"}, json.dumps(tree).encode())
        elif path == "/api/datasets/org/card":
            self.answer(["a/0.parquet", "b/0.parquet"], [{"config_name": "two", "data_files": "b/*"}], "1" * 40)
        elif path == "/api/datasets/org/copy":
            self.answer(["a.csv"], [], "2" * 40)
        elif path == "/api/datasets/org/copy/revision/refs/convert/parquet":
            self.answer(["default/train/0000.parquet", "default/test/0000.parquet"], [], "3" * 40)
        else:
            body = path.rpartition("/resolve/")[2].encode()
            self.send({"ETag": f'"{hash(path)}"', "X-Repo-Commit": body.decode()[:40]}, body)

    do_HEAD = do_GET

    def answer(self, names, configs, sha):
        facts = {"id": "org/x", "sha": sha, "siblings": [{"rfilename": name} for name in names], "cardData": {"configs": configs}}
        self.send({"Content-Type": "application/json"}, json.dumps(facts).encode())

    def send(self, headers, body):
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_the_card_and_the_copy_on_the_hub_are_found_by_the_real_client(ask):
    server = ThreadingHTTPServer(("127.0.0.1", 0), CardHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        said = ask(
            f"http://127.0.0.1:{server.server_port}", "hf:org/card", "hf:org/card/two:train", "hf:org/copy", "hf:org/copy/gone"
        )
    finally:
        server.shutdown()
        server.server_close()
    assert said[:3] == [f"{'1' * 40}/b/0.parquet"] * 2 + [f"{'3' * 40}/default/train/0000.parquet"]
    assert said[3] == "DataError hf:org/copy/gone: no configuration 'gone'; choose one of default"
