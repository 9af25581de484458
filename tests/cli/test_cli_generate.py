"""`ingot generate`: text for readers, and for programs JSON lines on stdout with everything else on stderr."""

import io
import json
import sys

import pytest

from ingot import api
from ingot.backends.sampling import GenerationOptions
from ingot.console.output import visible
from ingot.data.tokenizers import ByteTokenizer
from ingot.errors import DataError
from ingot.inference.prompt_files import read_prompts


@pytest.fixture
def lines(call):
    """The objects on stdout of a command that succeeds."""

    def words(*given):
        code, out, err = call(*given)
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()]

    return words


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


GREEDY = ("--greedy", "--max-new-tokens", 8, "--dtype", "fp32", "--device", "cpu")


def test_a_file_of_prompts_may_begin_with_a_mark_and_have_any_character_in_its_texts(tmp_path):
    records = "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n" for text in ("a\u2028b", "c"))
    (tmp_path / "p.jsonl").write_bytes(records.encode("utf-8-sig"))
    assert [one["prompt"] for one in read_prompts(tmp_path / "p.jsonl")] == ["a\u2028b", "c"]


def test_prompts_of_a_file_come_back_in_order_with_their_texts(lines, reference, tmp_path):
    file = written(tmp_path / "p.jsonl", {"prompt": "abc", "id": 1}, {"prompt": ""}, {"prompt": "some words of "})
    found = lines("generate", reference, "--prompts-file", file, *GREEDY)
    assert [(one["prompt"], one.get("id")) for one in found] == [("abc", 1), ("", None), ("some words of ", None)]
    options = GenerationOptions(8, greedy=True)
    assert [one["completion"] for one in found] == api.load(reference, device="cpu").generate_batch(
        [one["prompt"] for one in found], options
    )
    assert found[0]["generation"] == {
        "max_new_tokens": 8,
        "temperature": 1.0,
        "top_k": None,
        "top_p": None,
        "do_sample": False,
        "repetition_penalty": 1.0,
        "seed": 1337,
    }


def test_a_checkpoint_is_named_by_its_folder_and_a_run_by_its_own(call, reference):
    newest = max((reference / "checkpoints").iterdir())
    one, other = (call("generate", path, "--prompt", "abc", *GREEDY) for path in (newest, reference))
    assert one == other and one[0] == 0 and one[1].startswith("abc")


def test_the_full_text_and_a_file_of_output(call, lines, reference, tmp_path):
    [one] = lines("generate", reference, "--input", written(tmp_path / "p.jsonl", {"prompt": "abc"}), *GREEDY)
    words = ("--return-full-text", "--stop-at-end", "--output", tmp_path / "a/b.jsonl")
    code, out, err = call("generate", reference, "--prompt", "abc", *GREEDY, *words)
    assert (code, out) == (0, "") and "b.jsonl: 1 texts" in err
    assert json.loads((tmp_path / "a/b.jsonl").read_text())["completion"] == "abc" + one["completion"]


def test_a_stream_tells_the_pieces_before_the_whole(lines, reference, tmp_path):
    file = written(tmp_path / "p.jsonl", {"prompt": "abc"})
    *pieces, whole = lines("generate", reference, "--input", file, *GREEDY, "--stream")
    assert len(pieces) > 1 and {piece["index"] for piece in pieces} == {0}
    assert "".join(piece["piece"] for piece in pieces) == whole["completion"]


@pytest.mark.parametrize("words", [("--temperature", 0), ("--top-k", 0), ("--prompt", "")], ids=str)
def test_temperature_0_top_k_0_and_an_empty_prompt_write(call, reference, words):
    assert call("generate", reference, "--prompt", "abc", "--tokens", 4, "--device", "cpu", *words)[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Missing argument 'PATH'"),
        (["b", "--prompt", "c", "--input", "d"], "give either --prompt TEXT or --prompts-file FILE"),
        (["RUN", "--prompt", "c", "--dtype", "int8"], "int8"),
        (["b", "--prompt", "c", "--top-p", "0"], "--top-p must be a number above 0 and at most 1, not 0.0"),
        (["b", "--prompt", "c", "--temperature", "inf"], "--temperature must be a number of 0 or more, not inf"),
        (["b", "--prompt", "c", "--repetition-penalty", "nan"], "--repetition-penalty must be a number above 0, not nan"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_exit_code_2(call, reference, words, said):
    code, out, err = call("generate", *(reference if word == "RUN" else word for word in words))
    assert (code, out) == (2, "")
    assert said in err and len(err.splitlines()) == 1


def test_a_prompts_file_with_bad_lines_names_all_of_them(call, reference, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\nnot json\n[1]\n{"text": "a"}\n{"prompt": 5}\n{"prompt": "\\ud800"}\n')
    code, _, err = call("generate", reference, "--prompts-file", tmp_path / "p.jsonl")
    assert code == 2
    for part in (":2: this is not JSON", ":3: this is not a JSON object", ":4: prompt", ":5: prompt", ":6: prompt"):
        assert part in err


@pytest.mark.parametrize("option", ["--input", "--prompts-file", "--prompt-file"])
def test_a_file_of_prompts_that_is_not_there_is_missing_data(call, reference, option):
    code, out, err = call("generate", reference, option, "/nowhere/p.jsonl")
    assert (code, out) == (3, "") and "/nowhere/p.jsonl cannot be read: No such file" in err and err.count("\n") == 1


def test_a_field_that_cannot_be_utf_8_comes_back_in_a_file_as_it_was(call, reference, tmp_path):
    file = written(tmp_path / "p.jsonl", {"prompt": "abc", "id": "\ud800"})
    code, _, err = call("generate", reference, "--input", file, *GREEDY, "--output", tmp_path / "t.jsonl")
    assert code == 0, err
    assert json.loads((tmp_path / "t.jsonl").read_bytes())["id"] == "\ud800"


def test_each_line_has_the_seed_that_draws_its_text_alone(lines, call, reference, tmp_path):
    file = written(tmp_path / "p.jsonl", *({"prompt": "a b c"} for _ in range(3)))
    words = ("--tokens", 12, "--temperature", 2, "--device", "cpu")
    found = lines("generate", reference, "--prompts-file", file, *words)
    assert [one["generation"]["seed"] for one in found] == [1337, 1338, 1339]
    for one in found:
        seed = one["generation"]["seed"]
        alone = call("generate", reference, "--prompt", "a b c", *words, "--seed", seed, "--stop-at-end", "--json")[1]
        assert json.loads(alone)["texts"] == ["a b c" + one["completion"]]


READ = ("--greedy", "--tokens", 8, "--device", "cpu")


def test_a_prompt_comes_from_stdin_or_a_file_without_the_last_line_end(call, reference, tmp_path, monkeypatch):
    usual = call("generate", reference, "--prompt", "some\nwords", *READ)
    assert usual[0] == 0 and usual[1].startswith("some\nwords")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"some\nwords\n")))
    assert call("generate", reference, "--prompt", "-", *READ) == usual
    (tmp_path / "prompt.txt").write_bytes(b"some\nwords\n")
    assert call("generate", reference, "--prompt-file", tmp_path / "prompt.txt", *READ) == usual


def test_a_prompt_has_its_line_ends_from_stdin_and_from_a_file(call, reference, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_bytes(b"a\r\nb\r\n")
    of_file = call("generate", reference, "--prompt-file", tmp_path / "prompt.txt", *READ, "--json")[1]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\r\nb\r\n")))
    of_stdin = call("generate", reference, "--prompt", "-", *READ, "--json")[1]
    assert of_file == of_stdin and json.loads(of_file)["prompt"] == "a\r\nb"


def test_a_prompt_that_cannot_be_encoded_is_not_printed_before_the_error(call, reference, monkeypatch):
    assert call("generate", reference, "--prompt", "a\udcff", *READ) == (
        3,
        "",
        "ingot: error: --prompt is not valid UTF-8; encode it as UTF-8\n",
    )

    def refuse(tokenizer, text):
        raise DataError("not a character of this vocabulary")

    monkeypatch.setattr(ByteTokenizer, "encode_document", refuse)
    code, out, err = call("generate", reference, "--prompt", "abc", *READ)
    assert (code, out) == (3, "") and "not a character" in err


@pytest.mark.parametrize(
    ("words", "code", "answer"),
    [
        (["--prompt", "a", "--prompt-file", "b"], 2, "give either --prompt TEXT or --prompt-file FILE, not both"),
        (["--prompt-file", "/nowhere/b"], 3, "/nowhere/b cannot be read: No such file or directory"),
        (["--prompt", "-"], 3, "stdin is not UTF-8 text (byte 1)"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_one_line(call, reference, monkeypatch, words, code, answer):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff")))
    found, out, err = call("generate", reference, *words)
    assert (found, out) == (code, "") and answer in err and err.count("\n") == 1


def test_control_characters_are_visible_on_a_terminal_and_kept_in_a_pipe(call, reference, monkeypatch):
    words = ("generate", reference, "--prompt", "a\x1b[31m", "--temperature", 9, "--tokens", 200, "--device", "cpu")
    piped = call(*words)[1]
    assert piped.startswith("a\x1b[31m") and visible(piped) != piped
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = call(*words)[1]
    assert shown == visible(piped) and shown.startswith("a\\x1b[31m")
    assert all(one.isprintable() or one in "\n\t" or ord(one) > 0x9F for one in shown)
