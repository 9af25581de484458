"""The accuracies of `ingot eval --tasks` are lm-eval's to the last digit: on the exported model, and through `ingot serve`.

The questions are lm-eval's own tasks, given the published items in the columns that they have on the hub. Needs lm-eval
(`pip install 'ingot-lm[lm-eval]'`, `tenacity` and `aiohttp` for its client) and the real items, and is skipped without them.
"""

import json
import re
import sys
import tarfile
from pathlib import Path

import pytest
import torch
import yaml
from serve_client import Client

from ingot.api import load, train
from ingot.artifact.container import write_artifact
from ingot.artifact.huggingface import write_model
from ingot.backends.torch.state import model_records
from ingot.cli.main import call
from ingot.data.tokenizers import ByteTokenizer, GPT2Tokenizer
from ingot.errors import Setting
from ingot.inference.model import foreign_weights
from ingot.inference.scoring import read_items, score_tasks, task_rows
from ingot.model.registry import build

sys.path.append(str(Path(__file__).parents[1] / "data"))
from toy_tokenizers import shared

pytestmark = pytest.mark.long
ITEMS, PART = 200, "adjunct_island"
SETTINGS = {"family": "gpt2", "layers": 2, "heads": 2, "width": 32, "context": 2048}
TOKENIZERS = {"byte": (ByteTokenizer, 260), "gpt2": (GPT2Tokenizer, 50257)}
THEIRS = {  # the definitions of lm-eval
    "hellaswag": "hellaswag/hellaswag.yaml",
    "lambada": "lambada/lambada_openai.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "blimp": f"blimp/{PART}.yaml",
}


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    """The first items of each published file, as `--task-data` takes them."""
    folder = tmp_path_factory.mktemp("items")
    for name in ("hellaswag_val", "lambada_openai", "arc_easy", "arc_challenge", "piqa", "winogrande"):
        lines = shared(f"eval/{name}.jsonl").read_text().splitlines()[:ITEMS]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "blimp").mkdir()
    with tarfile.open(shared("eval/blimp.tar.xz")) as archive:
        lines = archive.extractfile(f"data/{PART}.jsonl").read().splitlines()[:ITEMS]
    (folder / "blimp" / f"{PART}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return folder


def hub_row(name, line):
    """An item in the columns of the dataset on the hub."""
    match name:
        case "hellaswag":
            label, _, rest = line["ctx"].partition(": ")
            first, _, second = rest.rpartition(" ")
            return {**line, "activity_label": label, "ctx_a": first, "ctx_b": second, "label": str(line["label"])}
        case "lambada":
            return {"text": f"{line['context']} {line['continuation']}"}
        case "arc_easy" | "arc_challenge":
            labels = [chr(ord("A") + number) for number in range(len(line["choices"]))]
            choices = {"text": line["choices"], "label": labels}
            return {"question": line["query"].removeprefix("Question: "), "choices": choices, "answerKey": labels[line["gold"]]}
        case "piqa":
            goal = line["query"].removeprefix("Question: ").rstrip()
            return {"goal": goal, "sol1": line["choices"][0], "sol2": line["choices"][1], "label": line["gold"]}
        case "winogrande":
            one, two = line["context_options"]
            same = next((place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
            before = one[:same]
            options = {"option1": one[len(before) :], "option2": two[len(before) :], "answer": str(line["gold"] + 1)}
            return {"sentence": f"{before}_ {line['continuation']}", **options}
    return line


@pytest.fixture(scope="module")
def tasks(items, tmp_path_factory):
    """lm-eval's tasks over these items; and the items as our reader takes them in the same columns."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra `lm-eval`)")
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("lm-eval")
    definitions = Path(lm_eval.__file__).parent / "tasks"
    for name, file in THEIRS.items():
        [source] = [path for path in items.rglob("*.jsonl") if path.stem.startswith((name, PART if name == "blimp" else name))]
        rows = [hub_row(name, json.loads(line)) for line in source.read_text().splitlines()]
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        told = {
            "include": str(definitions / file),
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(source) for split in ("train", "validation", "test")}},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(told))
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def model(request, tmp_path_factory):
    """A model with random weights, and the folder that `ingot export --format huggingface` writes of it."""
    make, ids = TOKENIZERS[request.param]
    torch.manual_seed(0)
    settings, tokenizer, folder = {**SETTINGS, "vocab_size": ids}, make(), tmp_path_factory.mktemp(request.param)
    drawn = build(settings)
    with torch.no_grad():
        for parameter in drawn.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    weights = foreign_weights(folder / "model.ingot", model_records(drawn), settings, tokenizer)
    write_artifact(folder / "model.ingot", weights.tensors.values(), weights.facts, "none", "none")
    write_model(folder / "exported", weights.tensors.values(), weights.config.model.model_dump(), tokenizer.spec())
    return load(folder / "model.ingot", device="cpu"), folder / "exported"


def accuracies(found):
    """lm-eval's accuracies, by our names of the tasks."""
    names = {"acc,none": "acc", "acc_norm,none": "acc_norm"}
    return {
        name.removeprefix("local_"): {names[metric]: value for metric, value in told.items() if metric in names}
        for name, told in found["results"].items()
    }


def test_accuracies_are_lm_evals_to_the_last_digit(model, items, tasks):
    from lm_eval import simple_evaluate

    opened, exported = model
    rows = task_rows(read_items(list(THEIRS), items, ITEMS), opened.tokenizer, opened.context, Setting("--truncate"))
    ours = {
        name: {metric: value for metric, (value, _) in score.metrics.items() if metric.startswith("acc")}
        for name, score in score_tasks(rows, opened.backend).items()
    }
    asked = {"tasks": [f"local_{name}" for name in THEIRS], "task_manager": tasks, "bootstrap_iters": 0, "num_fewshot": 0}
    loaded = f"pretrained={exported},dtype=float32"
    theirs = accuracies(simple_evaluate(model="hf", model_args=loaded, device="cpu", batch_size=16, **asked))
    server = Client(opened)
    try:
        words = f"model=small,base_url={server.address}/v1/completions,tokenizer={exported},tokenizer_backend=huggingface"
        # Its client leaves the start of a document out unless it is told otherwise; its Hugging Face backend does not.
        limits = f"max_length={opened.context},tokenized_requests=True,num_concurrent=1,add_bos_token=True"
        served = accuracies(simple_evaluate(model="local-completions", model_args=f"{words},{limits}", batch_size=64, **asked))
    finally:
        server.close()
    print(json.dumps({"ours": ours, "exported": theirs, "served": served}, indent=1))
    assert {name: len(found) for name, found in ours.items()} == {name: len(found) for name, found in theirs.items()}
    assert ours == theirs == served


CODE_SETTINGS = {
    "llama": {"family": "llama", "kv_heads": 1},
    "golf": {"family": "golf", "kv_heads": 1},
    "frontier": {"family": "frontier", "window": 200, "layers": 5},
    "custom": None,  # the model of docs/your-own-model.md
}
TWO = ("piqa", "arc_easy")


@pytest.fixture(params=list(CODE_SETTINGS))
def exported(request, tmp_path, monkeypatch):
    """A model of a family, and its folder for transformers, which asks for code unless the family is llama."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    torch.manual_seed(0)
    if CODE_SETTINGS[request.param] is None:
        page = (Path(__file__).parents[2] / "docs/your-own-model.md").read_text()
        (tmp_path / "mine.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
        small = {"layers": 2, "heads": 2, "width": 32, "file": str(tmp_path / "mine.py")}
        budget, training = {"seconds": None}, {"max_steps": 3, "tokens_per_step": 1024, "output_dir": str(tmp_path / "run")}
        given = {"model": small, "budget": budget, "training": {**training, "device": "cpu"}, "data": {"seq_len": 1024}}
        source = train(
            recipe="demo", quiet=True, artifact={"score": False}, evaluation={"rows": 1, "final_rows": 1}, **given
        ).run_dir
    else:
        settings = {**SETTINGS, "context": 1024, "vocab_size": 260, **CODE_SETTINGS[request.param]}
        drawn, source = build(settings), tmp_path / "model.ingot"
        with torch.no_grad():
            for parameter in drawn.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        weights = foreign_weights(source, model_records(drawn), settings, ByteTokenizer())
        write_artifact(source, weights.tensors.values(), weights.facts, "none", "none")
    assert call(["export", str(source), "--format", "huggingface", "--dtype", "fp32", "--output", str(tmp_path / "hf")]) == 0
    return load(source, device="cpu"), tmp_path / "hf"


def test_models_of_every_family_score_in_transformers_as_here(exported, items, tasks):
    from lm_eval import simple_evaluate

    opened, folder = exported
    rows = task_rows(read_items(list(TWO), items, ITEMS), opened.tokenizer, opened.context, Setting("--truncate"))
    ours = {
        name: {metric: value for metric, (value, _) in score.metrics.items() if metric.startswith("acc")}
        for name, score in score_tasks(rows, opened.backend).items()
    }
    asked = {"tasks": [f"local_{name}" for name in TWO], "task_manager": tasks, "bootstrap_iters": 0, "num_fewshot": 0}
    loaded = f"pretrained={folder},dtype=float32,trust_remote_code=True"
    theirs = accuracies(simple_evaluate(model="hf", model_args=loaded, device="cpu", batch_size=8, **asked))
    print(json.dumps({"ours": ours, "exported": theirs}))
    assert ours == theirs
