"""Which of our kernels a model uses; the trials themselves stand for a GPU's."""

import pytest
import torch
from torch import nn

from ingot.backends.torch.tune import KERNELS, settle_kernels, tag_compiler_cache
from ingot.errors import ConfigError


class Model(nn.Sequential):
    """A model with parts that can use these kernels."""

    def __init__(self, has):
        super().__init__(*(nn.Identity() for _ in has))
        for part, name in zip(self, has, strict=True):
            setattr(part, f"fused_{name}", False)


class Trials:
    """Attempts that fail while a model uses a kernel that does not run."""

    def __init__(self, model, broken):
        self.model, self.broken, self.tried = model, broken, []

    def __call__(self, attention):
        self.tried.append(attention)
        for module in self.model.modules():
            for name in self.broken:
                if getattr(module, f"fused_{name}", False):
                    raise RuntimeError(f"no {name} for this device\nand a long story")


def settled(asked, kept=None, able=True, broken=(), has=KERNELS, waits=False):
    model = Model(has)
    chosen = settle_kernels(model, asked, kept, able, waits, Trials(model, broken), list)
    used = {name for name in KERNELS for module in model.modules() if getattr(module, f"fused_{name}", False)}
    assert used == set(chosen)
    return chosen


def test_kernels_that_are_asked_for_are_used_where_the_model_has_them():
    assert settled(["rotary", "loss"]) == ["loss", "rotary"]
    assert settled(["rotary", "loss"], has=["loss"]) == ["loss"]
    assert settled("off") == []
    assert settled("auto") == list(KERNELS)


def test_short_steps_are_not_made_to_wait_for_launches():
    assert settled("auto", waits=True) == ["loss", "scales", "stream"]
    assert settled(["mlp"], waits=True) == ["mlp"], "asked for by its name"


def test_a_kernel_that_is_a_part_of_flash_attention_is_tried_with_it():
    trials = Trials(model := Model(KERNELS), ())
    settle_kernels(model, ["loss", "qkv"], None, True, False, trials, list)
    assert trials.tried == [None, "flash4"]


def test_other_devices_have_none():
    assert settled(["loss"], able=False) == []


def test_a_run_goes_on_with_the_kernels_that_it_began_with():
    assert settled(["rotary", "loss"], kept=["loss"]) == ["loss"]
    assert settled(["rotary"], kept=[]) == []


def test_by_itself_a_run_uses_those_that_run():
    assert settled("auto", broken=["loss"]) == ["rotary", "qkv", "mlp", "gate", "scales", "stream"]


def test_a_kernel_asked_for_by_name_that_does_not_run_is_told():
    with pytest.raises(
        ConfigError, match=r"training\.kernels: rotary failed a test run: RuntimeError: no rotary for this device$"
    ):
        settled(["rotary"], broken=["rotary"])


def test_what_is_known_to_run_here_is_not_tried():
    model = Model(KERNELS)
    assert settle_kernels(model, "auto", ["loss"], True, False, None, list) == ["loss"]
    assert model[0].fused_loss and not model[1].fused_rotary
    assert settle_kernels(model, "off", ["loss"], True, False, None, list) == [] and not model[0].fused_loss


def test_compiled_graphs_are_not_taken_from_the_cache_of_other_operations(tmp_path, monkeypatch):
    (tmp_path / "loss.py").write_text("a = 1")
    monkeypatch.setattr("ingot.model.kernels.__path__", [str(tmp_path)])
    tags = []
    for text in ("a = 1", "a = 2", "a = 1"):
        (tmp_path / "loss.py").write_text(text)
        with torch.compiler.config.patch(cache_key_tag=""):  # monkeypatch would take the setting away
            tag_compiler_cache()
            tags.append(torch.compiler.config.cache_key_tag)
    assert tags[0] == tags[2] != tags[1] and tags[0].startswith("ingot ")
    with torch.compiler.config.patch(cache_key_tag="mine"):
        tag_compiler_cache()
        assert torch.compiler.config.cache_key_tag == "mine"
