import json

import pytest

from ingot.data.sources import count_documents, find_files, read_documents
from ingot.errors import DataError


def jsonl(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path, field="text"):
    return list(read_documents([path], field))


def test_a_folder_is_searched_to_the_bottom_in_sorted_order(tmp_path):
    for name in ("b.txt", "a/z.jsonl", "a/b/c.TXT", "notes.md", "a/x.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    files, ignored = find_files([tmp_path])
    assert [file.relative_to(tmp_path).as_posix() for file in files] == ["a/b/c.TXT", "a/z.jsonl", "b.txt"]
    assert [file.relative_to(tmp_path).as_posix() for file in ignored] == ["a/x.bin", "notes.md"]


def test_text_is_taken_byte_for_byte(tmp_path):
    text = "\ufeffone\r\ntwo\rthree\n\x00\u2028é"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert read(tmp_path / "a.txt") == [text]


def test_a_line_of_jsonl_is_a_document_and_blank_lines_are_none(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a\\nb"}\r\n\n  \n{"text": ""}\n{"text": "\\ud83d\\ude00"}')
    assert read(tmp_path / "a.jsonl") == ["a\nb", "", "😀"]


def test_another_text_field_can_be_named(tmp_path):
    assert read(jsonl(tmp_path / "a.jsonl", {"text": "no", "body": "yes"}), "body") == ["yes"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "b"', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('["b"]', "expected a JSON object with a field 'text', found list"),
        ('{"body": 1, "id": 2}', "no field 'text'; fields found: 'body', 'id'; name the right one with --text-field"),
        ("{}", "no field 'text'; fields found: none"),
        ('{"text": 3}', "field 'text' is not a string but int"),
        ('{"text": null}', "field 'text' is not a string but NoneType"),
        ('{"text": "\\ud800"}', "field 'text' holds half a surrogate pair"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, line, problem):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n' + line + "\n")
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a.jsonl")
    assert str(caught.value).startswith(f"{tmp_path / 'a.jsonl'}:3: {problem}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "before"), [("a.txt", b"12345"), ("a.jsonl", b'{"text": "a"}\n"')])
def test_invalid_utf8_is_named_with_its_offset_in_the_file(tmp_path, name, before):
    (tmp_path / name).write_bytes(before + b"\xff\n")
    with pytest.raises(DataError, match=rf"{name} is not UTF-8: byte 0xff at offset {len(before)};"):
        read(tmp_path / name)


def test_progress_adds_up_to_the_size_of_the_files(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    jsonl(tmp_path / "b.jsonl", {"text": "a"}, {"text": ""})
    seen = []
    files, _ = find_files([tmp_path])
    list(read_documents(files, "text", seen.append))
    assert sum(seen) == sum(file.stat().st_size for file in files)


def test_counting_leaves_out_empty_documents_and_stops_at_the_limit(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n{"text": ""}\n{"text": "b"}\n')
    (tmp_path / "d.jsonl").write_text("not read any more")
    files, _ = find_files([tmp_path])
    assert count_documents(files, "text", 3) == 3
    assert count_documents(files[:3], "text", 99) == 3
