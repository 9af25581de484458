"""Tasks from files in their published formats, scored as lm-eval scores them; the items here are made up."""

import io
import json
import math
import os
import sys
import tarfile
import types

import numpy as np
import pytest
import torch
from small_model import write_small_model
from typer.testing import CliRunner

from ingot.cli.main import app
from ingot.data.tokenizers import ByteTokenizer, GPT2Tokenizer
from ingot.data.tokenizers.hf_json import from_json
from ingot.data.tokenizers.learn_vocabulary import learn
from ingot.data.tokenizers.plain import CharTokenizer
from ingot.errors import ConfigError, DataError, Setting
from ingot.eval.tasks import TASKS, Item, read_task, score_items, task_names
from ingot.inference.model import LoadedModel
from ingot.inference.scoring import encode_pair, read_items, score_tasks, task_rows

HELLASWAG = {
    "activity_label": "Baking", "ctx_a": "A man takes flour.", "ctx_b": "he", "ctx": "A man takes flour. he", "label": "1",
    "endings": ["flies [title] away.", "adds  water.", "sleeps."],
}  # fmt: skip
ARC = {
    "question": {"stem": "What is wet?", "choices": [{"text": "water", "label": "A"}, {"text": "sand", "label": "B"}]},
    "answerKey": "B",
}
LINES = {
    "hellaswag": [HELLASWAG, {"ctx": "Sailing: A boat", "label": 0, "endings": ["sails.", "sings."]}],
    "lambada": [{"text": "He had a dog and called the dog"}, {"context": "a b c", "continuation": "d"}],
    "arc_easy": [
        ARC,
        {"question": "What is dry?", "choices": {"text": ["sand", "tea"], "label": ["1", "2"]}, "answerKey": "1"},
        {"query": "Question: What is hot?", "choices": ["fire", "ice", "snow"], "gold": 0},
    ],
    "piqa": [
        {"goal": "Boil", "sol1": "heat it", "sol2": "cool it", "label": 0},
        {"query": "Question: x\n", "choices": ["a", "bb"], "gold": 1},
    ],
    "winogrande": [
        {"sentence": "Ann met Eve so _ was glad.", "option1": "Ann", "option2": "Eve", "answer": "2"},
        {"context_options": ["a b", "a c"], "continuation": "is so.", "gold": 0},
    ],
}
FILES = {
    "hellaswag": "hellaswag_val",
    "lambada": "lambada_openai",
    "arc_easy": "arc_easy",
    "piqa": "piqa",
    "winogrande": "winogrande",
}


@pytest.fixture
def folder(tmp_path):
    for name, lines in LINES.items():
        (tmp_path / f"{FILES[name]}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with tarfile.open(tmp_path / "blimp.tar.xz", "w:xz") as archive:
        for name in ("one", "two"):
            text = json.dumps({"sentence_good": f"Cats sleep {name}.", "sentence_bad": f"Cats sleeps {name}."}).encode() + b"\n"
            entry = tarfile.TarInfo(f"data/{name}.jsonl")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    return tmp_path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("model") / "small.ingot")


def run_tasks(model, names, folder, truncate=False):
    cut = None if truncate else Setting("--truncate")
    return score_tasks(task_rows(read_items(names, folder), model.tokenizer, model.context, cut), model.backend)


def test_items_are_what_lm_eval_asks(folder):
    def asked(name):
        return [(item.pairs, item.gold) for items in read_task(name, folder).values() for item in items]

    assert asked("hellaswag")[1] == ((("Sailing: A boat", " sails."), ("Sailing: A boat", " sings.")), 0)
    assert asked("lambada") == [((("He had a dog and called the", " dog"),), 0), ((("a b c", " d"),), 0)]
    assert asked("arc_easy")[0] == (
        (("Question: What is wet?\nAnswer:", " water"), ("Question: What is wet?\nAnswer:", " sand")),
        1,
    )
    assert [gold for _, gold in asked("arc_easy")] == [1, 0, 0]
    assert asked("arc_easy")[2][0][0] == ("Question: What is hot?\nAnswer:", " fire")
    assert asked("piqa")[0] == ((("Question: Boil\nAnswer:", " heat it"), ("Question: Boil\nAnswer:", " cool it")), 0)
    assert asked("piqa")[1] == ((("Question: x\nAnswer:", " a"), ("Question: x\nAnswer:", " bb")), 1)
    assert asked("winogrande")[0] == ((("Ann met Eve so Ann", " was glad."), ("Ann met Eve so Eve", " was glad.")), 1)
    assert asked("blimp")[1] == ((("", " Cats sleep two."), ("", " Cats sleeps two.")), 0)


def test_the_marks_of_wikihow_are_taken_out(folder):
    [first, *_] = read_task("hellaswag", folder)["hellaswag_val"]
    assert [continuation for _, continuation in first.pairs] == [" flies. away.", " adds water.", " sleeps."]
    assert first.pairs[0][0] == "Baking: A man takes flour. He"


def test_labels_may_lie_beside_the_items_as_piqa_has_them(tmp_path):
    (tmp_path / "piqa").mkdir()
    line = {"goal": "Boil", "sol1": "heat it", "sol2": "cool it"}
    (tmp_path / "piqa" / "valid.jsonl").write_text((json.dumps(line) + "\n") * 2)
    (tmp_path / "piqa" / "valid-labels.lst").write_text("1\n0\n")
    assert [item.gold for item in read_task("piqa", tmp_path)["valid"]] == [1, 0]


def test_scores_are_those_of_each_pair_alone(model, folder):
    """The likeliest choice, by what the model itself gives each choice in a pass of its own."""
    scores = run_tasks(model, ["arc_easy", "blimp", "lambada"], folder)
    right, right_norm = [], []
    for item in read_task("arc_easy", folder)["arc_easy"]:
        logs = []
        for context, continuation in item.pairs:
            row = [1, *ByteTokenizer().encode(context + continuation).tolist()]
            first = 1 + len(ByteTokenizer().encode(context))
            with torch.no_grad():
                alone = model.backend.model(torch.tensor([row[:-1]]))[0].log_softmax(-1)
            logs.append(sum(float(alone[place - 1, row[place]]) for place in range(first, len(row))))
        right.append(float(np.argmax(logs) == item.gold))
        right_norm.append(float(np.argmax(np.array(logs) / np.array([len(rest) - 1 for _, rest in item.pairs])) == item.gold))
    assert scores["arc_easy"].metrics["acc"][0] == np.mean(right)
    assert scores["arc_easy"].metrics["acc_norm"][0] == np.mean(right_norm)
    assert (scores["blimp"].items, sorted(scores["blimp"].parts)) == (2, ["one", "two"])
    assert scores["lambada"].metrics["perplexity"][0] > 1


def test_means_and_their_standard_errors():
    items = [Item((("", " a"), ("", " bb")), gold) for gold in (0, 0, 1)]
    found = score_items(TASKS["piqa"], items, [[(-1.0, True), (-1.5, False)]] * 3)
    assert found.metrics["acc"] == (pytest.approx(2 / 3), pytest.approx(math.sqrt(1 / 3) / math.sqrt(3)))
    assert found.metrics["acc_norm"][0] == pytest.approx(1 / 3)  # -1 of one letter is worse than -1.5 of two
    words = score_items(TASKS["lambada"], items, [[(-1.0, True)], [(-2.0, False)], [(-3.0, True)]])
    assert words.metrics["acc"][0] == pytest.approx(2 / 3) and words.metrics["perplexity"][0] == pytest.approx(math.exp(2))
    assert found.record()["acc_stderr"] == found.metrics["acc"][1]


def test_a_space_at_the_end_of_a_context_belongs_to_the_continuation():
    gpt2 = GPT2Tokenizer()
    assert (
        encode_pair(gpt2, "a dog ", "runs")
        == encode_pair(gpt2, "a dog", " runs")
        == (gpt2.encode("a dog").tolist(), gpt2.encode(" runs").tolist())
    )
    assert encode_pair(gpt2, "", " runs") == ([50256], gpt2.encode(" runs").tolist())
    assert encode_pair(ByteTokenizer(), "a", "b") == ([1, 101], [102])
    own = from_json(learn("bpe", ["some text for a vocabulary"] * 5, 270), "<|endoftext|>")
    continuation = own.encode("some").tolist()[len(own.encode("so")) :]
    assert encode_pair(own, "so", "me") == (own.encode_document("so").tolist(), continuation)
    with pytest.raises(DataError, match=r"char tokenizer"):
        encode_pair(CharTokenizer("abc"), "", "a")


def test_what_is_wrong_is_told_before_anything_is_scored(model, folder, monkeypatch):
    monkeypatch.setattr(type(model.backend), "score_rows", None)  # so that it cannot be
    with pytest.raises(ConfigError, match=r"'mmlu'.*hellaswag, lambada"):
        task_names("lambada,mmlu")
    with pytest.raises(ConfigError, match=r"no task was named"):
        task_names(" ,")
    with pytest.raises(DataError, match=r"arc_challenge\.jsonl"):
        run_tasks(model, ["lambada", "arc_challenge"], folder)
    with pytest.raises(DataError, match=r"nowhere"):
        run_tasks(model, ["lambada"], folder / "nowhere")
    (folder / "lambada_openai.jsonl").write_text(json.dumps({"text": "a " * 100 + "word"}) + "\n")
    with pytest.raises(ConfigError, match=r"1 of 1 texts of lambada_openai .*64 tokens.*--truncate"):
        run_tasks(model, ["lambada"], folder)
    (folder / "lambada_openai.jsonl").write_text(json.dumps({"text": "a " + "b" * 100}) + "\n")
    with pytest.raises(DataError, match=r"101 tokens.*64"):
        run_tasks(model, ["lambada"], folder, truncate=True)


def test_a_text_that_is_too_long_loses_its_beginning_where_that_is_asked_for(model, folder):
    (folder / "lambada_openai.jsonl").write_text(json.dumps({"text": "a " * 100 + "word"}) + "\n")
    long = run_tasks(model, ["lambada"], folder, truncate=True)["lambada"]
    row = ByteTokenizer().encode("a " * 100 + "word").tolist()[-65:]
    with torch.no_grad():
        alone = model.backend.model(torch.tensor([row[:-1]]))[0].log_softmax(-1)
    total = sum(float(alone[place - 1, row[place]]) for place in range(60, 65))
    assert long.metrics["perplexity"][0] == pytest.approx(math.exp(-total), rel=1e-4)


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"text": 5}', '{"context": "a"}', "[" * 10**5])
def test_a_line_that_is_not_an_item_is_told_with_its_number(folder, line):
    (folder / "lambada_openai.jsonl").write_text(json.dumps({"text": "a b"}) + "\n" + line + "\n")
    with pytest.raises(DataError, match=r"line 2 of lambada_openai is not a valid item of the task"):
        read_task("lambada", folder)


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("piqa", {"goal": "a", "sol1": "a", "sol2": "b"}, "it has no 'label'"),
        ("hellaswag", {"ctx": "a", "endings": ["b", "c"], "label": "2"}, "the answer has index 2, but there are 2 choices"),
        ("hellaswag", {"ctx": "a", "endings": ["b", ""], "label": "1"}, "a continuation is empty"),
        ("lambada", {"context": "", "continuation": ""}, "a continuation is empty"),
        ("lambada", {"text": "word"}, "the text has only one word"),
        ("arc_easy", {**ARC, "answerKey": "C"}, "answerKey is not the label of a choice"),
        (
            "winogrande",
            {"sentence": "a _", "option1": "b", "option2": "c", "answer": "1"},
            "a continuation is empty",
        ),
    ],
)
def test_what_is_no_item_is_refused_with_the_reason(folder, name, line, reason):
    (folder / f"{FILES[name]}.jsonl").write_text(json.dumps(line))
    with pytest.raises(DataError, match=rf"line 1 of {FILES[name]} is not a valid item of the task: {reason}$"):
        read_task(name, folder)


def test_files_that_cannot_be_read_are_told_and_a_pipe_is_not_waited_for(folder):
    archive = bytearray((folder / "blimp.tar.xz").read_bytes())
    archive[len(archive) // 2] ^= 255
    (folder / "blimp.tar.xz").write_bytes(archive)
    (folder / "piqa.jsonl").unlink()
    (folder / "piqa").mkdir()
    (folder / "piqa" / "valid.jsonl").write_text(json.dumps(LINES["piqa"][0]))
    (folder / "piqa" / "valid-labels.lst").write_bytes(b"\xff")
    for name, file in (("lambada", "lambada_openai.jsonl"), ("arc_easy", "arc_easy.jsonl")):
        (folder / file).unlink()
        os.mkfifo(folder / file) if name == "lambada" else (folder / file).mkdir()
    for name, told in {
        "blimp": r"blimp.tar.xz cannot be read",
        "piqa": r"valid-labels.lst is not UTF-8 text",
        "lambada": r"cannot read .*lambada_openai.jsonl: it is a pipe",
        "arc_easy": r"cannot read .*arc_easy.jsonl: Is a directory",
    }.items():
        with pytest.raises(DataError, match=told):
            read_task(name, folder)


def test_the_verb_prints_accuracies_and_says_what_does_not_go_together(model, folder):
    def call(*words):
        return CliRunner().invoke(app, ["eval", str(model.weights.path), "--device", "cpu", *map(str, words)])

    told = json.loads(call("--tasks", "piqa,winogrande", "--task-data", folder, "--limit", 1, "--json").stdout)["tasks"]
    assert (told["piqa"]["items"], sorted(told["winogrande"])) == (1, ["acc", "acc_stderr", "items"])
    assert "+-" in call("--tasks", "piqa", "--task-data", folder).stdout
    assert "--limit" in str(call("--limit", 3).exception)
    assert "cannot be combined with --data, --rows" in str(call("--tasks", "piqa", "--task-data", folder, "--rows", 3).exception)


def test_the_class_for_lm_eval_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.delitem(sys.modules, "ingot.compat.lm_eval", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'ingot-lm\[lm-eval\]'"):
        __import__("ingot.compat.lm_eval")


def test_lm_eval_s_own_questions_get_our_numbers(model):
    """Where lm-eval is installed: its requests of continuations, of whole texts and of texts to write."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from lm_eval.api.instance import Instance

    from ingot.compat.lm_eval import IngotLM

    theirs = IngotLM(str(model.weights.path), device="cpu")
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in (("a dog", " runs"), ("", " Cats sleep."))]
    for (log, greedy), (context, continuation) in zip(
        theirs.loglikelihood(requests), (one.args for one in requests), strict=True
    ):
        before, after = encode_pair(model.tokenizer, context, continuation)
        scores = model.backend.score_rows([before + after], [len(before)], 1)[0]
        assert (log, greedy) == (pytest.approx(scores.total, abs=1e-5), False)
    assert len(theirs.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("text " * 40,), 0)])) == 1
    [text] = theirs.generate_until([Instance("generate_until", {}, ("abc", {"until": ["zz"], "max_gen_toks": 5}), 0)])
    assert text == model.generate("abc", tokens=5, temperature=0.0, stop_at_end=True).removeprefix("abc")


@pytest.mark.parametrize(("tokenizer", "first"), [(GPT2Tokenizer(), []), (ByteTokenizer(), [1])])
def test_texts_that_are_written_for_lm_eval_begin_as_those_that_are_scored(monkeypatch, tokenizer, first):
    api = types.SimpleNamespace(TemplateLM=object, register_model=lambda name: lambda made: made)
    api.get_rolling_token_windows = api.make_disjoint_window = None
    for name in ("lm_eval", "lm_eval.api.model", "lm_eval.api.registry", "lm_eval.utils"):
        monkeypatch.setitem(sys.modules, name, api)
    monkeypatch.delitem(sys.modules, "ingot.compat.lm_eval", raising=False)
    theirs, asked = __import__("ingot.compat.lm_eval", fromlist=["IngotLM"]), []
    monkeypatch.delitem(sys.modules, "ingot.compat.lm_eval")  # made with a package that is not there
    backend = types.SimpleNamespace(generate=lambda rows, sampling: asked.extend(rows) or iter(()))
    model = theirs.IngotLM.__new__(theirs.IngotLM)
    model.model = LoadedModel(None, tokenizer, backend)
    assert model.generate_until([types.SimpleNamespace(args=("Hello there", {"max_gen_toks": 3}))]) == [""]
    assert asked == [model.tok_encode("Hello there")] == [first + tokenizer.encode("Hello there").tolist()]
