"""gpt-simple's 18 names in Python: signatures, the model, the tokenizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from original import SIGNATURES, TheirRun

import ingot.compat.gpt_simple as gpt_simple
from ingot.compat.gpt_simple import ConfigError, ModelConfig, SimpleLLM, SimpleLLMTokenizer


def test_names_signatures_and_exit_codes_are_the_originals(their_run: TheirRun) -> None:
    said: list[object] = []
    exec(SIGNATURES, {"module": gpt_simple, "said": said})
    assert said == [their_run.signatures]


def test_the_package_is_imported_without_torch() -> None:
    program = (
        "import sys, ingot.compat.gpt_simple as g; g.Config(); assert len(g.__all__) == 18; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_source_tree_without_installation_metadata_is_imported() -> None:
    program = (
        "import importlib.metadata as metadata\n"
        "def missing(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = missing\n"
        "import ingot.compat.gpt_simple as g; assert g.__version__ == '(not installed)', g.__version__"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ((768, 12, 12), 123_587_328),
        ((1024, 24, 16), 359_842_816),
        ((2048, 24, 32), 1_336_248_320),
        ((2560, 34, 20), 2_825_105_920),
    ],
)
def test_a_model_has_the_parameters_of_gpt_simples(shape: tuple[int, int, int], parameters: int) -> None:
    width, layers, heads = shape
    with torch.device("meta"):
        model = SimpleLLM(ModelConfig(vocab_size=50304, n_embd=width, n_layer=layers, n_head=heads))
        grouped = SimpleLLM(ModelConfig(vocab_size=50304, n_embd=width, n_layer=layers, n_head=heads, n_kv_head=heads // 2))
    assert model.get_num_params(non_embedding=False) == parameters
    assert model.get_num_params() == parameters - 50304 * width
    assert parameters - grouped.get_num_params(non_embedding=False) == layers * 2 * width * width // 2  # keys and values alone


@pytest.mark.parametrize(("kind", "inner"), [("gated", 2048), ("mlp", 3072)])
def test_the_width_inside_the_mlp_follows_from_its_kind(kind: str, inner: int) -> None:
    with torch.device("meta"):
        model = SimpleLLM(ModelConfig(vocab_size=128, n_layer=1, mlp_type=kind))
    assert inner in {size for name, p in model.named_parameters() if "mlp" in name for size in p.shape}


def test_a_config_says_its_heads_and_inner_width_as_gpt_simples_does() -> None:
    config = ModelConfig(n_embd=768, n_head=12, n_kv_head=4)
    assert (config.kv_heads, config.intermediate_dim()) == (4, 2048)
    assert (ModelConfig().kv_heads, ModelConfig(mlp_type="mlp").intermediate_dim()) == (12, 3072)
    assert ModelConfig(intermediate_size=100).intermediate_dim() == 100


def test_from_the_checkout_gpt_simple_is_imported_and_run_by_its_own_name() -> None:
    root = Path(__file__).parents[3]
    program = "import gpt_simple, ingot.compat.gpt_simple as ours; assert gpt_simple is ours and gpt_simple.Config"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root)
    ran = subprocess.run([sys.executable, "-m", "gpt_simple", "--help"], check=True, cwd=root, capture_output=True, text=True)
    assert "batch-generate" in ran.stdout


@pytest.fixture
def small() -> SimpleLLM:
    torch.manual_seed(0)
    return SimpleLLM(ModelConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_kv_head=2, n_positions=64)).eval()


def test_labels_are_shifted_and_minus_100_is_not_counted(small: SimpleLLM) -> None:
    ids = torch.randint(64, (2, 9))
    labels = ids.clone()
    labels[0, 5:] = -100
    out = small(ids, labels=labels, return_dict=True)
    picked = out["logits"][:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(out.loss, -torch.cat([picked[0, :4], picked[1]]).mean())
    loss, logits = small(ids, labels=labels)
    torch.testing.assert_close((loss, logits), (out.loss, out.logits))


def test_cached_greedy_text_is_what_the_model_finds_likeliest_token_by_token(small: SimpleLLM) -> None:
    ids = torch.randint(64, (2, 7))
    plain = ids
    with torch.no_grad():
        for _ in range(12):
            plain = torch.cat([plain, small(plain)[0][:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(small.generate(ids, max_new_tokens=12, do_sample=False), plain)


def test_tokens_after_a_cache_have_the_scores_they_have_without_one(small: SimpleLLM) -> None:
    ids = torch.randint(64, (2, 9))
    first = small(ids[:, :5], use_cache=True, return_dict=True)
    rest = small(ids[:, 5:], past_key_values=first.past_key_values, use_cache=True, return_dict=True)
    torch.testing.assert_close(rest.logits, small(ids)[0][:, 5:])


def test_rows_that_do_not_begin_at_their_left_end_are_refused(small: SimpleLLM) -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ConfigError, match="pad rows on the right"):
        small(ids, attention_mask=torch.tensor([[0, 1, 1, 1]]))
    with pytest.raises(ConfigError, match="position_ids must"):
        small(ids, position_ids=torch.tensor([[3, 4, 5, 6]]))
    small(ids, attention_mask=torch.tensor([[1, 1, 1, 0]]), position_ids=torch.tensor([[0, 1, 2, 0]]))


def test_the_tokenizer_has_gpt_simples_ids_and_methods(gpts: Path) -> None:
    tokenizer = SimpleLLMTokenizer("tok")
    assert (tokenizer.vocab_size, tokenizer.pad_token_id) == (301, 300)
    assert tokenizer.eos_token_id == tokenizer.eod_token_id == 0
    ids = tokenizer.encode("ab cd")
    assert tokenizer.decode(ids) == "ab cd"
    assert tokenizer.decode([*ids, 0, 300], skip_special_tokens=False) == "ab cd<|endoftext|><|pad|>"
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize("ab cd")) == ids
    rows = tokenizer.encode(["ab cd", "a"], padding=True, return_tensors="pt")
    assert rows.shape == (2, len(ids)) and rows[1, -1] == 300
