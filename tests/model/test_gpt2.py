import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ingot.backends.open import open_backend
from ingot.backends.torch.state import record
from ingot.config.schema import Config
from ingot.data.tokenizers import CharTokenizer
from ingot.model.gpt2 import GPT2
from ingot.runtime.ranks import Ranks
from ingot.train.step_plan import Position, plan_step

torch.set_num_threads(1)

GOLDEN = Path(__file__).parents[1] / "golden"
NUMBERS = json.loads((GOLDEN / "golden.json").read_text())
CASES = {Path(case["file"]).stem: case for case in NUMBERS["nanogpt"]}
TINY_SHAKESPEARE = Path(__file__).parents[3] / "shared" / "data" / "tinyshakespeare" / "input.txt"


def engine(model, seq_len, rows, **optimizer):
    training = {"max_steps": 10, "tokens_per_step": rows * seq_len, "device": "cpu", "precision": "fp32", "compile": False}
    config = Config(model=model, data={"seq_len": seq_len}, optimizer=optimizer, training=training)
    backend = open_backend(config, model["vocab_size"], Ranks())
    return config, backend


def put(backend, tensors):
    backend.load({"model": {name: record(name, value) for name, value in tensors.items()}, "optimizer": {}})


@pytest.fixture(scope="module", params=sorted(CASES))
def run(request):
    """Three steps of the real engine from nanoGPT's weights, on nanoGPT's batches."""
    case = CASES[request.param]
    tensors = load_file(GOLDEN / case["file"])
    model = {
        "layers": case["n_layer"],
        "heads": case["n_head"],
        "width": case["n_embd"],
        "context": case["block_size"],
        "vocab_size": case["vocab_size"],
        "bias": case["bias"],
        "gelu": case["gelu"],
    }
    x, y = tensors["x"], tensors["y"]  # (3, B, T)
    adamw = {"learning_rate": 1e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "clip_norm": 1.0, "schedule": "constant"}
    config, backend = engine(model, x.size(2), x.size(1), **adamw)
    put(backend, {name[7:]: value for name, value in tensors.items() if name.startswith("before.")})
    with torch.no_grad():
        logits = backend.model(x[0])
    batches = torch.stack([x, y], dim=2).to(torch.int32).numpy()  # (3, B, 2, T)
    plans = [plan_step(config, Position(i)) for i in range(3)]
    backend.tune([(plans[0], batches[0])], {})
    targets = (y != -1).sum(dim=(1, 2)).tolist()
    results = [backend.step(batches[i], targets[i], plans[i]).result() for i in range(3)]
    return case, tensors, logits, results, backend.model.state_dict()


def test_logits_are_those_of_nanogpt(run):
    _, tensors, logits, _, _ = run
    torch.testing.assert_close(logits, tensors["logits"], atol=1e-5, rtol=0)


def test_losses_of_three_steps_are_those_of_nanogpt(run):
    case, tensors, _, results, _ = run
    assert (tensors["y"] == -1).any()
    assert [r.loss for r in results] == pytest.approx([loss for loss, _ in case["loss_and_grad_norm"]], abs=1e-5)


def test_gradient_norms_of_three_steps_are_those_of_nanogpt(run):
    case, _, _, results, _ = run
    assert [r.grad_norm for r in results] == pytest.approx([norm for _, norm in case["loss_and_grad_norm"]], abs=1e-5)


def test_weights_after_three_adamw_steps_are_those_of_nanogpt(run):
    _, tensors, _, _, weights = run
    expected = {name[6:]: value for name, value in tensors.items() if name.startswith("after.")}
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, atol=5e-5, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


def test_the_first_ten_losses_of_nanogpts_readme_run_come_out():
    if not TINY_SHAKESPEARE.is_file():
        pytest.skip(f"tiny Shakespeare is not at {TINY_SHAKESPEARE}")
    text = TINY_SHAKESPEARE.read_text()
    tokenizer = CharTokenizer(text)
    ids = tokenizer.encode(text)
    tensors = load_file(GOLDEN / "nanogpt_readme_cpu.safetensors")
    offsets = tensors.pop("offsets").tolist()  # (10, 12)
    model = {"layers": 4, "heads": 4, "width": 128, "context": 64, "vocab_size": 65, "bias": False, "gelu": "erf"}
    adamw = {"learning_rate": 1e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99, "clip_norm": 1.0}
    config, backend = engine(model, 64, 12, **adamw, schedule="cosine", warmup_steps=100, decay_steps=2000)
    assert tokenizer.vocab_size == 65
    put(backend, tensors)
    batches = [
        np.stack([[ids[start : start + 64], ids[start + 1 : start + 65]] for start in starts]).astype(np.int32)
        for starts in offsets
    ]  # (12, 2, 64) each: tokens and targets
    plans = [plan_step(config, Position(i)) for i in range(10)]
    backend.tune([(plans[0], batches[0])], {})
    losses = [backend.step(batch, 12 * 64, plans[i]).result().loss for i, batch in enumerate(batches)]
    assert losses == pytest.approx(NUMBERS["nanogpt_readme_cpu_run"]["first_ten_losses"], abs=1e-3)


@pytest.mark.parametrize(("bias", "count"), [(True, 124_475_904), (False, 124_373_760)])
def test_gpt2_small_has_the_parameters_it_is_known_for(bias, count):
    with torch.device("meta"):
        model = GPT2(vocab_size=50304, context=1024, bias=bias)
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT2(vocab_size=80, context=32, layers=2, heads=4, width=48)


def tokens_of(model, rows=2, length=None):
    return torch.randint(model.transformer.wte.num_embeddings, (rows, length or model.context))


@torch.no_grad()
def test_an_untrained_model_knows_nothing(model):
    tokens, targets = tokens_of(model, 64), tokens_of(model, 64)
    assert model(tokens, targets).item() == pytest.approx(math.log(80), abs=0.05)


@pytest.mark.parametrize("layers", [1, 8])
def test_branches_start_smaller_the_deeper_the_model_is(layers):
    torch.manual_seed(0)
    model = GPT2(vocab_size=80, context=32, layers=layers, heads=4, width=96)
    for name, p in model.named_parameters():
        if name.endswith("c_proj.weight"):
            assert p.std().item() == pytest.approx(0.02 / math.sqrt(2 * layers), rel=0.05)
        elif p.dim() == 2:
            assert p.std().item() == pytest.approx(0.02, rel=0.05)
        else:
            assert (p == (0 if name.endswith("bias") else 1)).all()


def test_more_tokens_than_the_context_are_refused(model):
    with pytest.raises(ValueError, match=r"33 tokens do not fit into a context of 32"):
        model(tokens_of(model, length=33))


def test_the_head_is_the_token_embedding(model):
    assert not [name for name, _ in model.named_parameters() if "head" in name]
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model(tokens, tokens).backward()
    rows = model.transformer.wte.weight.grad.norm(dim=1)  # (V): only row 0 is fed, all are scored
    assert (rows > 0).all()


@torch.no_grad()
def test_ignored_targets_count_for_nothing(model):
    tokens, targets = tokens_of(model), tokens_of(model)
    keep = torch.rand(targets.shape) < 0.4
    log_probabilities = model(tokens).log_softmax(-1)
    nll = -log_probabilities.gather(2, targets[..., None])[..., 0]  # (B, T)
    assert model(tokens, targets.where(keep, -1)).item() == pytest.approx(nll[keep].mean().item(), abs=1e-6)


def test_ignored_targets_send_no_gradient(model):
    tokens, targets = tokens_of(model), tokens_of(model)
    targets[:, 8:] = -1
    model(tokens, targets).backward()
    rows = model.transformer.wpe.weight.grad.norm(dim=1)
    assert (rows[:8] > 0).all()
    assert (rows[8:] == 0).all()


@torch.no_grad()
def test_dropout_happens_in_training_alone(model):
    dropping = GPT2(vocab_size=80, context=32, layers=2, heads=4, width=48, dropout=0.2)
    dropping.load_state_dict(model.state_dict())
    tokens = tokens_of(model)
    assert not torch.equal(dropping(tokens), dropping(tokens))
    dropping.eval()
    assert torch.equal(dropping(tokens), model(tokens))


@torch.no_grad()
def test_gelu_is_openais_or_nanogpts():
    torch.manual_seed(0)
    x = 20 * torch.randn(1000, 48)
    openai, nanogpt = (GPT2(80, 32, layers=1, heads=4, width=48, gelu=form).blocks[0].mlp for form in ("tanh", "erf"))
    nanogpt.load_state_dict(openai.state_dict())
    h = openai.c_fc(x)
    tanh = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    erf = 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))
    torch.testing.assert_close(openai(x), openai.c_proj(tanh), atol=1e-6, rtol=0)
    torch.testing.assert_close(nanogpt(x), nanogpt.c_proj(erf), atol=1e-6, rtol=0)
    assert (openai(x) - nanogpt(x)).abs().max() > 1e-5
