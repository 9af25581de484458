"""ckpt.pt: what is read, what is written, and what is said of files that are neither."""

import errno
import pickle
import re
import zipfile
from argparse import Namespace

import pytest
import torch
from foreign import ARGUMENTS, CONFIG, Foreign, groups, names

from ingot.backends.torch.state import load_model, model_records, optimizer_tensors, record, tensor
from ingot.compat.nanogpt.checkpoint import read_ckpt, write_ckpt
from ingot.compat.nanogpt.keys import MODEL_ARGS
from ingot.config.schema import OptimizerSection
from ingot.data.tokenizers import ByteTokenizer
from ingot.errors import CheckpointError, ConfigError
from ingot.model.registry import build
from ingot.optim.groups import make_optimizers
from ingot.runs.checkpoints import Checkpoint, load_checkpoint, save_checkpoint

torch.set_num_threads(1)

MODEL = {
    "family": "gpt2", "layers": 11, "heads": 2, "width": 8, "context": 12, "vocab_size": 260, "dropout": 0.1, "bias": True,
    "gelu": "tanh",
}  # fmt: skip


@pytest.fixture(scope="module")
def foreign():
    return Foreign()


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """A checkpoint of ours after two steps of eleven layers: by name, 10 stands before 2."""
    torch.manual_seed(0)
    model = build(MODEL)
    optimizers = make_optimizers(model, OptimizerSection(), torch.device("cpu"))
    for _ in range(2):
        model(torch.randint(260, (2, 12)), torch.randint(260, (2, 12))).backward()
        optimizers[0].step()
    memory = [record(n, t) for n, t in optimizer_tensors(optimizers, {p: name for name, p in model.named_parameters()})]
    progress = {"config": {"model": MODEL | {"vocab_size": None}}, "tokenizer": ByteTokenizer().spec(), "val_loss": 3.25}
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    folder.mkdir()
    return load_checkpoint(save_checkpoint(folder, 2, {"model": model_records(model), "optimizer": memory}, progress))


def args_of(settings):
    return {theirs: settings[ours] for theirs, ours in MODEL_ARGS.items()}


def values(records):
    return {name: tensor(record) for name, record in records.items()}


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("case", ["nanogpt_bias", "nanogpt_nobias"])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod."])
def test_a_checkpoint_of_nanogpt_is_read_with_and_without_the_compiler_s_prefix(tmp_path, case, prefix):
    foreign = Foreign(case)
    found = read_ckpt(foreign.save(tmp_path / "ckpt.pt", prefix))
    same(values(found.weights), {name: p.detach() for name, p in foreign.parameters.items()})
    same(values(found.optimizer), foreign.memory())
    assert (found.iter_num, found.best_val_loss, args_of(found.settings)) == (3, 2.5, foreign.args)
    assert found.config == {**CONFIG, "bias": foreign.args["bias"]}
    assert (found.settings["gelu"], found.checkpoint, found.tokenizer) == ("erf", None, None)
    assert found.missing == ("the order of the data", "the random states")


def test_its_model_computes_what_nanogpt_s_does(tmp_path, foreign):
    found = read_ckpt(foreign.save(tmp_path / "ckpt.pt"))
    model = build(found.settings).eval()
    load_model(model, found.weights, "the file")
    with torch.no_grad():
        torch.testing.assert_close(model(foreign.golden["x"][0]), foreign.golden["logits"], atol=1e-5, rtol=0)


def test_masks_that_old_files_hold_are_left_out(tmp_path, foreign):
    model = {**foreign.contents()["model"], "transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32).tril()}
    assert len(read_ckpt(foreign.save(tmp_path / "ckpt.pt", model=model)).weights) == len(foreign.parameters)


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (None, "there is none"),
        ({"state": {}, "param_groups": [{"params": [0, 1]}]}, "it is empty"),
        (
            {"state": {0: {"step": 1}}, "param_groups": [{"params": [0, 1]}]},
            "it does not match AdamW's state for these parameters",
        ),
        ({"state": {0: 5}, "param_groups": "none"}, "there is none"),
    ],
)
def test_weights_are_read_without_the_optimizer_and_what_is_missing_is_said(tmp_path, foreign, optimizer, reason):
    found = read_ckpt(foreign.save(tmp_path / "ckpt.pt", optimizer=optimizer))
    assert found.optimizer == {}
    assert found.missing[0] == f"the optimizer state ({reason})"


def test_a_file_without_config_and_with_few_arguments_is_read(tmp_path, foreign):
    few = {name: foreign.args[name] for name in ("n_layer", "n_head")}
    found = read_ckpt(foreign.save(tmp_path / "ckpt.pt", model_args=few, config=None, best_val_loss=1e9))
    assert (args_of(found.settings), found.config, found.best_val_loss) == (foreign.args, {}, None)


def test_what_is_written_has_nanogpt_s_keys_and_types_and_one_more(tmp_path, ours):
    write_ckpt(tmp_path / "ckpt.pt", ours, CONFIG)
    found = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert list(found) == ["model", "optimizer", "model_args", "iter_num", "best_val_loss", "config", "ingot"]
    assert list(found["model"]) == [*names(11, True), "lm_head.weight"]
    assert found["model"]["lm_head.weight"].data_ptr() == found["model"]["transformer.wte.weight"].data_ptr()
    expected = {"n_layer": 11, "n_head": 2, "n_embd": 8, "block_size": 12, "bias": True, "vocab_size": 260, "dropout": 0.1}
    assert (found["model_args"], list(found["model_args"])) == (expected, list(ARGUMENTS))
    assert (type(found["iter_num"]), found["iter_num"]) == (int, 2)
    assert found["best_val_loss"].shape == () and float(found["best_val_loss"]) == 3.25
    assert found["config"] == CONFIG and len(CONFIG) == 33


def test_nanogpt_s_own_optimizer_takes_the_state_and_goes_on_as_ours_does(tmp_path, ours):
    write_ckpt(tmp_path / "ckpt.pt", ours, CONFIG)
    found = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    parameters = {name: torch.nn.Parameter(found["model"][name]) for name in names(11, True)}
    decay, rest = ([parameters[name] for name in group] for group in groups({n: p.detach() for n, p in parameters.items()}))
    theirs = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1.0)
    theirs.load_state_dict(found["optimizer"])
    assert [(g["lr"], g["betas"], g["weight_decay"]) for g in theirs.param_groups] == [
        (1e-3, (0.9, 0.95), 0.1),
        (1e-3, (0.9, 0.95), 0.0),
    ]
    memory = values(ours.tensors["optimizer"])
    assert len(memory) == 3 * len(parameters)
    for name, p in parameters.items():
        same({key: theirs.state[p][key] for key in ("step", "exp_avg", "exp_avg_sq")}, {
            key: memory[f"{name}/{key}"] for key in ("step", "exp_avg", "exp_avg_sq")
        })  # fmt: skip


def test_what_was_written_is_read_back_bit_for_bit(tmp_path, ours):
    write_ckpt(tmp_path / "ckpt.pt", ours, CONFIG)
    found = read_ckpt(tmp_path / "ckpt.pt")
    same(values(found.weights), values(ours.weights))
    same(values(found.optimizer), values(ours.tensors["optimizer"]))
    assert (found.settings, found.iter_num, found.best_val_loss) == (MODEL, 2, 3.25)
    assert (found.settings["gelu"], found.tokenizer) == ("tanh", ByteTokenizer().spec())


def test_it_names_the_checkpoint_of_ours_while_that_is_there(ours, tmp_path):
    run = ours.path.parent.parent
    write_ckpt(run / "ckpt.pt", ours, CONFIG)
    assert read_ckpt(run / "ckpt.pt").checkpoint == ours.path.resolve()
    (run / "ckpt.pt").rename(tmp_path / "ckpt.pt")
    assert read_ckpt(tmp_path / "ckpt.pt").checkpoint is None


@pytest.mark.parametrize("name", ["../secret", "/", 5, "missing"])
def test_a_name_that_leads_elsewhere_is_ignored(tmp_path, foreign, name):
    (tmp_path / "secret").mkdir()
    assert read_ckpt(foreign.save(tmp_path / "run/ckpt.pt", ingot={"checkpoint": name})).checkpoint is None


def test_the_memory_of_another_optimizer_is_left_out(tmp_path, ours):
    muon = {name: record for name, record in ours.tensors["optimizer"].items() if not name.endswith("exp_avg")}
    write_ckpt(tmp_path / "ckpt.pt", Checkpoint(ours.path, 2, ours.progress, {**ours.tensors, "optimizer": muon}), CONFIG)
    found = read_ckpt(tmp_path / "ckpt.pt")
    assert (found.optimizer, found.missing[0]) == ({}, "the optimizer state (it is empty)")


def test_another_family_has_no_place_in_it(tmp_path, ours):
    progress = {**ours.progress, "config": {"model": {"family": "llama"}}}
    with pytest.raises(ConfigError, match="gpt2 family only"):
        write_ckpt(tmp_path / "ckpt.pt", Checkpoint(ours.path, 2, progress, ours.tensors), CONFIG)


def test_a_disk_that_fills_up_leaves_the_file_before(tmp_path, ours, monkeypatch):
    path = tmp_path / "ckpt.pt"
    write_ckpt(path, ours, CONFIG)
    save = torch.save

    def half(contents, file):
        save(contents, file)
        file.truncate(file.tell() // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(CheckpointError, match=r"ckpt.pt cannot be written: No space left on device"):
        write_ckpt(path, ours, {**CONFIG, "max_iters": 7})
    assert read_ckpt(path).config == CONFIG
    assert [file.name for file in tmp_path.iterdir()] == ["ckpt.pt"]


class Hostile:
    def __reduce__(self):
        return print, ("it ran",)


def flipped(path):
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def compressed(path):
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


DAMAGES = {
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-1000]), "is damaged"),
    "cut shorter": (lambda path: path.write_bytes(path.read_bytes()[:4985]), "is damaged"),
    "flipped": (flipped, "is damaged"),
    "empty": (lambda path: path.write_bytes(b""), "is damaged"),
    "text": (lambda path: path.write_text("hello"), "it was not written by torch.save"),
    "code": (lambda path: path.write_bytes(pickle.dumps(Hostile())), "it was not written by torch.save"),
    "code in a zip": (lambda path: torch.save(Hostile(), path), "print, but only"),
    "a model": (
        lambda path: torch.save({"model": torch.nn.Linear(1, 1)}, path),
        "holds torch.nn.modules.linear.Linear, but only",
    ),
    "settings of a class": (
        lambda path: torch.save({"config": Namespace()}, path),
        "holds argparse.Namespace, but only numbers, text and tensors "
        "are loaded, so that no code in a file can run; save its state_dict and settings again without that object",
    ),
    "a number repeated by strides": (
        lambda path: torch.save({"model": {"a": torch.zeros(1).expand(10**6, 10**6)}, "model_args": {}}, path),
        "a tensor is larger than its data in the file",
    ),
    "the same numbers many times": (
        lambda path: torch.save({"model": dict.fromkeys(map(str, range(100)), torch.zeros(300, 500).t())}, path),
        "its tensors are larger than the file",
    ),
    "a tensor without numbers": (
        lambda path: torch.save({"model": {"a": torch.zeros(10**6, 10**6, device="meta")}, "model_args": {}}, path),
        "a tensor is larger than its data in the file",
    ),
    "compressed": (compressed, "entries are compressed, which torch.save never does"),
    "list": (lambda path: torch.save([1, 2], path), "it lacks the key model or model_args"),
    "gone": (lambda path: path.unlink(), "does not exist"),
    "folder": (lambda path: (path.unlink(), path.mkdir()), "cannot be read: Is a directory"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_sentence(tmp_path, foreign, capsys, damage):
    path = foreign.save(tmp_path / "ckpt.pt")
    spoil, said = DAMAGES[damage]
    spoil(path)
    with pytest.raises(CheckpointError, match=re.escape(str(path)) if damage != "gone" else said) as error:
        read_ckpt(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300 + len(str(path))
    assert capsys.readouterr().out == ""


def changed(**changes):
    def change(contents):
        contents["model"] = {**contents["model"], **changes}

    return change


CONTENTS = {
    "no model": (lambda c: c.pop("model"), "it lacks the key model or model_args"),
    "no arguments": (lambda c: c.pop("model_args"), "it lacks the key model or model_args"),
    "no iteration": (lambda c: c.pop("iter_num"), "iter_num is None"),
    "a negative one": (lambda c: c.update(iter_num=-1), "iter_num is -1"),
    "other layers": (lambda c: c.update(model_args={**c["model_args"], "n_layer": 4}), "has no tensor transformer.h.3"),
    "fewer layers": (lambda c: c.update(model_args={**c["model_args"], "n_layer": 2}), "has a tensor transformer.h.2"),
    "billions of layers": (lambda c: c.update(model_args={**c["model_args"], "n_layer": 10**9}), "n_layer=1000000000"),
    "other heads": (lambda c: c.update(model_args={**c["model_args"], "n_head": 5}), "heads=5 does not divide"),
    "no heads": (lambda c: c.update(model_args={**c["model_args"], "n_head": 0}), "n_head=0"),
    "other width": (lambda c: c.update(model_args={**c["model_args"], "n_embd": 32}), "tensors' shapes imply 48"),
    "a word for dropout": (lambda c: c.update(model_args={**c["model_args"], "dropout": "much"}), "dropout='much'"),
    "another head": (changed(**{"lm_head.weight": torch.zeros(80, 48)}), "an untied output head"),
    "no tensor": (changed(**{"transformer.ln_f.weight": 5}), "transformer.ln_f.weight is not a dense tensor"),
    "numbers of another kind": (changed(**{"transformer.ln_f.weight": torch.ones(48, dtype=torch.int64)}), "has dtype I64"),
    "another shape": (changed(**{"transformer.ln_f.weight": torch.ones(7)}), "transformer.ln_f.weight has shape [7]"),
    "an unknown tensor": (changed(extra=torch.ones(7)), "has a tensor extra"),
    "flat embeddings": (changed(**{"transformer.wpe.weight": torch.ones(7)}), "is not a nanoGPT model"),
}  # fmt: skip


def test_weights_that_are_no_numbers_are_still_a_head_and_its_embedding(tmp_path, foreign):
    broken = torch.full((80, 48), torch.nan)
    model = {**foreign.contents()["model"], "transformer.wte.weight": broken, "lm_head.weight": broken.clone()}
    assert read_ckpt(foreign.save(tmp_path / "ckpt.pt", model=model)).settings["vocab_size"] == 80


@pytest.mark.parametrize("what", CONTENTS)
def test_contents_that_do_not_fit_are_named(tmp_path, foreign, what):
    contents = foreign.contents()
    change, said = CONTENTS[what]
    change(contents)
    torch.save(contents, tmp_path / "ckpt.pt")
    with pytest.raises(CheckpointError, match=re.escape(said)) as error:
        read_ckpt(tmp_path / "ckpt.pt")
    assert "ckpt.pt" in str(error.value)
