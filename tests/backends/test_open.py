"""The one place that chooses a framework."""

import subprocess
import sys

import numpy as np
import pytest

from ingot.backends.open import find_device, open_backend, open_group, open_inference
from ingot.config.schema import Config
from ingot.errors import CheckpointError, ConfigError
from ingot.runtime.ranks import Ranks

SMALL = {"layers": 2, "heads": 4, "width": 32}
ROWS = np.arange(2 * 2 * 16, dtype=np.int32).reshape(2, 2, 16) % 40


def config(family="gpt2", **training):
    training = {"max_steps": 1, "tokens_per_step": 32, "device": "cpu", "precision": "fp32", **training}
    return Config(model={**SMALL, "family": family}, data={"seq_len": 16}, training=training)


def records(backend):
    return {record.name: record for record in backend.weights()}


@pytest.mark.parametrize("name", ["gpu", "tpu:0", "meta"])
def test_an_unknown_device_is_refused_by_the_name_of_the_setting(name):
    with pytest.raises(ConfigError, match=rf"training\.device={name} .*use auto, cpu, cuda, cuda:N, mps or mlx"):
        open_backend(config(device=name), 40, Ranks())
    with pytest.raises(ConfigError, match=rf"training\.device={name}"):
        find_device(name)


@pytest.mark.parametrize("family", ["gpt2", "llama", "golf"])
def test_what_is_opened_to_be_judged_scores_like_what_was_trained(family):
    trained, judged = open_backend(config(family), 40, Ranks()), open_inference(config(family), 40)
    judged.load_weights(records(trained), "here")
    assert judged.score(ROWS) == trained.score(ROWS)
    assert {name: bytes(r.data) for name, r in records(judged).items()} == {n: bytes(r.data) for n, r in records(trained).items()}
    assert judged.parameters == trained.parameters and judged.device == trained.device


def test_weights_that_do_not_fit_are_refused_before_memory_is_taken():
    backend = open_inference(config(), 40)
    found = records(open_backend(config(), 41, Ranks()))
    with pytest.raises(
        CheckpointError, match=r"here: transformer\.wte\.weight has shape \[41, 32\], but \[40, 32\] in the model"
    ):
        backend.load_weights(found, "here")
    assert all(p.is_meta for p in backend.model.parameters())


def test_a_run_trained_in_fp16_is_judged_on_a_cpu_too():
    assert open_inference(config(precision="fp16"), 40).precision == "fp32"


def test_one_rank_alone_is_a_group():
    group = open_group(find_device("cpu"), Ranks())
    assert (group.maximum([2.0]), group.total([3.0]), group.broadcast("text")) == ([2.0], [3.0], "text")
    group.close()


@pytest.mark.parametrize("module", ["ingot.cli.main", "ingot.compat.nanogpt.train"])
def test_without_mlx_its_device_is_refused_with_the_command_that_installs_it(module, tmp_path):
    cli = module == "ingot.cli.main"
    words = ["train", "--training.device", "mlx", "--training.max_steps", "1"] if cli else ["--device=mlx"]
    start = "run()" if cli else "sys.exit(main(sys.argv[1:]))"
    program = f"import sys; sys.modules['mlx.core'] = None; from {module} import {'run' if cli else 'main'}; {start}"
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "device=mlx needs mlx, which is not installed; pip install 'ingot-lm[mlx]' (Linux: pip install 'mlx[cpu]')" in line


def test_choosing_a_framework_loads_none_of_them():
    program = (
        "import sys, ingot.backends.open, ingot.train.trainer; sys.exit('torch' in sys.modules or 'mlx.core' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_model_is_opened_without_torchs_compiler():
    program = """
import sys
from ingot.backends.open import open_inference
from ingot.backends.torch.build import build_model
from ingot.backends.torch.state import model_records
from ingot.config.schema import Config

config = Config(model={"layers": 1, "heads": 2, "width": 8}, data={"seq_len": 4}, training={"max_steps": 1, "device": "cpu"})
weights = {record.name: record for record in model_records(build_model(config, 40))}
opened = open_inference(config, 40)
opened.load_weights(weights, "here")
assert all(bytes(record.data) == bytes(weights[record.name].data) for record in opened.weights())
sys.exit("torch._dynamo" in sys.modules or "sympy" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
