"""Three steps of the golf baseline, against numbers that the challenge's own script computed on a CPU."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ingot.config.schema import OptimizerSection
from ingot.model.golf import Golf
from ingot.optim.groups import block_matrices, make_optimizers

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = {case["file"]: case for case in json.loads((GOLDEN / "golden.json").read_text())["golf"]}
EMBEDDING_RATES = {"golf_tied.safetensors": 0.03, "golf_untied.safetensors": 0.6}
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 products says so


class Run:
    """The model before, the gradients of the first step, the losses, and the weights after three steps."""

    def __init__(self, file, precision):
        case, self.tensors = CASES[file], load_file(GOLDEN / file)
        self.model = Golf(
            vocab_size=case["vocab_size"],
            context=self.tensors["x"].size(-1),
            layers=case["num_layers"],
            width=case["model_dim"],
            heads=case["num_heads"],
            kv_heads=case["num_kv_heads"],
            mlp_multiple=case["mlp_mult"],
            tied=case["tie_embeddings"],
            softcap=case["logit_softcap"],
            rope_base=case["rope_base"],
        )
        self.model.load_state_dict(self.named("before"))
        settings = OptimizerSection(
            name="muon",
            embedding_learning_rate=EMBEDDING_RATES[file],
            head_learning_rate=0.008,
            scalar_learning_rate=0.02,
            muon_learning_rate=0.02,
            weight_decay=0.0,
            muon_precision=precision,
        )
        optimizers = make_optimizers(self.model, settings, torch.device("cpu"))
        self.losses, self.gradients = [], {}
        for x, y in zip(self.tensors["x"], self.tensors["y"], strict=True):
            loss = self.model(x, y)
            loss.backward()
            self.losses.append(loss.item())
            self.gradients = self.gradients or {name: p.grad.clone() for name, p in self.model.named_parameters()}
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        self.expected_losses = case["losses"]
        self.muons = {name for name, _ in block_matrices(self.model)}

    def named(self, prefix):
        return {name.removeprefix(f"{prefix}."): t for name, t in self.tensors.items() if name.startswith(f"{prefix}.")}

    def weights(self):
        return {name: p.detach() for name, p in self.model.named_parameters()}


@pytest.fixture(scope="module", params=[(file, precision) for file in CASES for precision in ("fp32", "bf16")], ids="-".join)
def run(request):
    return Run(*request.param)


def test_the_first_loss_and_its_gradients_are_the_originals(run):
    assert run.losses[0] == pytest.approx(run.expected_losses[0], abs=1e-5)
    expected = run.named("grad")
    assert run.gradients.keys() == expected.keys()
    for name, gradient in run.gradients.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=0, msg=name)


def test_the_losses_after_an_update_are_the_originals(run):
    assert run.losses[1:] == pytest.approx(run.expected_losses[1:], abs=5e-5)


def test_muon_moves_every_matrix_as_the_original_does(run):
    before, after, weights = run.named("before"), run.named("after"), run.weights()
    assert run.muons
    for name in run.muons:
        expected, update = after[name] - before[name], weights[name] - before[name]
        assert (update - expected).norm() < 0.05 * expected.norm(), name


def test_adam_moves_everything_else_as_the_original_does(run):
    after, weights = run.named("after"), run.weights()
    rest = weights.keys() - run.muons
    assert {"tok_emb.weight", "skip_weights", "blocks.0.resid_mix", "blocks.0.attn.q_gain"} <= rest
    for name in rest:
        assert (weights[name] - after[name]).abs().mean() < 5e-4, name
