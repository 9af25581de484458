"""Notes of what was found out for a shape; the GPU is stood in for by what is asked of it."""

import pytest
import torch

from ingot.backends.torch.tune import Choices
from ingot.config.schema import Config
from ingot.runtime.devices import Device

GPU = Device("cuda", 0, "NVIDIA H200", None, ("bf16",))
FOUND = {"device": "NVIDIA H200", "micro_batch": 4, "attention": "cudnn"}


@pytest.fixture
def free(tmp_path, monkeypatch):
    """Bytes of the GPU's memory that nobody has taken."""
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    now = [1000]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (now[0], 2000))
    return now


def choices(device=GPU, world_size=1, **settings):
    training = {"max_steps": 1, **settings.pop("training", {})}
    config = Config.model_validate({**settings, "training": training})
    return Choices(config.model, config.data, config.training, device, world_size)


def kept(**settings):
    note = choices(**settings)
    assert note.recall() == {}
    note.keep(FOUND)


def test_a_later_run_of_the_same_shape_finds_the_note(free):
    kept()
    assert choices().recall() == FOUND
    assert choices(optimizer={"learning_rate": 1e-3}, training={"seed": 2, "max_steps": 5}).recall() == FOUND


@pytest.mark.parametrize(
    "other",
    [
        {"model": {"layers": 3}},
        {"data": {"seq_len": 128}},
        {"training": {"tokens_per_step": 32768}},
        {"training": {"kernels": ["loss"]}},
        {"training": {"fp8_head": True}},
        {"device": Device("cuda", 0, "NVIDIA A100", None, ("bf16",))},
        {"world_size": 2},
    ],
)
def test_another_shape_or_machine_does_not(free, other):
    kept()
    assert choices(**other).recall() == {}


def test_with_less_free_memory_it_is_found_out_anew(free):
    kept()
    free[0] = 900
    assert choices().recall() == {}


def test_a_choice_that_did_not_fit_is_forgotten(free):
    kept()
    choices().keep({})
    assert choices().recall() == {}


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"free": 1, "choices": 3}', '{"free": "x", "choices": {}}'])
def test_a_damaged_note_is_no_note(free, tmp_path, text):
    kept()
    (note,) = (tmp_path / "cache" / "choices").iterdir()
    note.write_text(text)
    assert choices().recall() == {}


def test_a_folder_that_cannot_be_written_is_no_error(free, tmp_path):
    (tmp_path / "cache").write_text("a file")
    kept()


def test_a_cpu_keeps_no_note(tmp_path, monkeypatch):
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    note = choices(device=Device("cpu", 0, "cpu", None, ("fp32",)))
    note.keep(FOUND)
    assert note.recall() == {} and not (tmp_path / "cache").exists()
