"""The bench of our kernels: that a toy goes through all of it, and which variants it compares."""

import sys

import speed_candidates
from step_profile import TOY, open_engine

from ingot.backends.torch.tune import KERNELS


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["speed_candidates.py", *arguments])
    speed_candidates.main()
    printed, errors = capsys.readouterr()
    assert "FAILED" not in printed, errors
    return printed


def test_a_toy_is_timed_with_and_without_each_kernel(monkeypatch, capsys):
    also = "training.loss_chunk=64 + attention=default-grouped"
    said = run(monkeypatch, capsys, "--toy", "--rounds", "1", "--steps", "1", "--also", also)
    rows = [line.split("|")[1].strip() for line in said.splitlines() if line.startswith("| ")]
    here = [name for name in KERNELS if name not in ("gate", "stream")]  # llama's, and of families whose stream is float32
    assert rows == ["variant", "none", *here, " + ".join(here), also]


def test_the_kernels_are_timed_by_themselves(monkeypatch, capsys):
    said = run(monkeypatch, capsys, "--alone")
    assert "head and loss, fused" in said and "head and loss, 8 bits" in said and said.count("with backward  fused") == 2


def test_a_kernel_that_the_model_has_no_use_for_is_no_variant():
    config = TOY.config()
    engine = open_engine(config, config.model.vocab_size)
    assert speed_candidates.variants(engine.model, ["loss"], {}) == {"loss": {"training.kernels": ["loss"]}}
    engine.close()


def test_all_variants_have_the_settings_of_the_base(monkeypatch, capsys):
    seen = []

    def opened(config, vocab_size):
        seen.append((config.training.kernels, config.training.loss_chunk, config.training.micro_batch))
        return open_engine(config, vocab_size)

    monkeypatch.setattr(speed_candidates, "open_engine", opened)
    words = ["--kernel", "none", "--rounds", "1", "--steps", "1", "--also", "training.loss_chunk=64"]
    said = run(monkeypatch, capsys, "--toy", "--base", "training.kernels=auto", "--base", "training.micro_batch=2", *words)
    assert seen == [("auto", None, 2), ("auto", 64, 2)] and "| training.loss_chunk=64 |" in said
