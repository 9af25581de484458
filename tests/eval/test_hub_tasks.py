"""Tasks from the Hugging Face hub: the real client against a server of our own, with datasets laid out as lm-eval's are there."""

import io
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from hub_server import serving

from ingot.errors import ConfigError, DataError
from ingot.eval.tasks import TASKS, read_task

ARC = {"question": "What is dry?", "choices": {"text": ["tea", "sand"], "label": ["A", "B"]}, "answerKey": "B"}
HELLASWAG = {
    "activity_label": "Baking",
    "ctx_a": "A man bakes.",
    "ctx_b": "he",
    "ctx": "",
    "endings": ["eats.", "runs."],
    "label": "1",
}
WINOGRANDE = {"sentence": "Ann met Eve so _ left.", "option1": "Ann", "option2": "Eve", "answer": "2"}
BLIMP = {"sentence_good": "Cats sleep.", "sentence_bad": "Cats sleeps.", "pair_id": 0}
DATASETS = {
    "Rowan/hellaswag": {"data/train-0.parquet": [{}], "data/validation-00000-of-00001.parquet": [HELLASWAG]},
    "EleutherAI/lambada_openai": {"default/test/0.parquet": [{"text": "a b c"}], "de/test/0.parquet": [{"text": "d e f"}]},
    "allenai/ai2_arc": {
        "ARC-Easy/test-0.parquet": [ARC] * 3,
        "ARC-Challenge/test-0.parquet": [ARC],
        "ARC-Easy/train-0.parquet": [ARC],
    },
    "baber/piqa": {"data/validation-0.parquet": [{"goal": "Boil", "sol1": "heat", "sol2": "cool", "label": 0}]},
    "allenai/winogrande": {"winogrande_xl/validation-0.parquet": [WINOGRANDE], "winogrande_xs/validation-0.parquet": [{}]},
    "nyu-mll/blimp": {f"{part}/train-00000-of-00001.parquet": [BLIMP] * 2 for part in ("one", "two")},
}


def table(rows):
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"filled": 1, **row} for row in rows]), out)
    return out.getvalue()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        files = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("{")[2]
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{server.endpoint}/{{{files}")
        for repository, files in DATASETS.items():
            server.commit(repository, {name: table(rows) for name, rows in files.items()})
        yield server


def test_every_task_is_read_from_its_dataset(hub):
    found = {name: read_task(name, None, limit=2) for name in TASKS}
    assert {name: {part: len(items) for part, items in parts.items()} for name, parts in found.items()} == {
        "hellaswag": {"hellaswag": 1},
        "lambada": {"lambada": 1},
        "arc_easy": {"arc_easy": 2},
        "arc_challenge": {"arc_challenge": 1},
        "piqa": {"piqa": 1},
        "winogrande": {"winogrande": 1},
        "blimp": {"one": 2, "two": 2},
    }
    [first, *_] = found["arc_easy"]["arc_easy"]
    assert (first.pairs[1], first.gold) == (("Question: What is dry?\nAnswer:", " sand"), 1)
    assert found["lambada"]["lambada"][0].pairs == (("a b", " c"),)
    assert found["hellaswag"]["hellaswag"][0].pairs[0] == ("Baking: A man bakes. He", " eats.")


def test_what_was_fetched_is_there_without_the_hub_and_the_rest_is_one_line(hub, monkeypatch):
    read_task("piqa", None)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert len(read_task("piqa", None)["piqa"]) == 1
    with pytest.raises(
        DataError, match=r"^cannot fetch hf:Rowan/hellaswag:validation: gave up .*give the folder with its files$"
    ):
        read_task("hellaswag", None)


def test_a_row_that_is_not_an_item_is_told_with_the_dataset_and_its_number(hub):
    hub.commit("baber/piqa", {"data/validation-0.parquet": table([{"goal": "Boil", "sol1": "a", "sol2": "b", "label": -1}])})
    with pytest.raises(DataError, match=r"hf:baber/piqa:validation: line 1 of piqa is not a valid item of the task"):
        read_task("piqa", None)


def test_without_pyarrow_nothing_is_fetched_and_the_extra_is_named(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"reading the task piqa from the hub needs the package pyarrow.*ingot-lm\[parquet\]"):
        read_task("piqa", None)
    assert hub.requests == []
