"""What the MLX backend keeps is what torch keeps, by the same names: a run moves from one to the other and back."""

from itertools import islice

import numpy as np
import pytest
from mlx_kit import MODELS, SHAPE, Position, Pupil, both, plan_step

from ingot.backends.open import find_device, open_backend, open_group, open_inference
from ingot.backends.sampling import Sampling
from ingot.config.schema import Config
from ingot.errors import CheckpointError, ConfigError, DataError
from ingot.model.registry import FAMILIES
from ingot.runtime.ranks import Ranks


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("model", MODELS)
def test_a_state_has_the_names_kinds_and_shapes_of_torchs(model, optimizer):
    found = []
    for pupil in both(model, {"name": optimizer, "ema_decay": 0.9}):
        start = pupil.raw()
        pupil.step(0)
        found.append((start, {name: (dtype, shape) for name, (dtype, shape, _) in pupil.raw().items()}))
    assert found[0] == found[1]


def test_an_embedding_in_bf16_stays_one():
    theirs, ours = both({**MODELS["golf"], "embedding_dtype": "bf16"})
    ours.step(0), theirs.step(0)
    state = ours.state()
    assert state["model"]["tok_emb.weight"].dtype == state["optimizer"]["tok_emb.weight/exp_avg"].dtype == "BF16"
    assert ours.mean() == pytest.approx(theirs.mean(), abs=1e-2)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_twenty_steps_here_twenty_on_torch_and_twenty_here_are_sixty_on_torch(optimizer):
    model = {"family": "golf", "layers": 2, "heads": 2, "kv_heads": 1, "width": 16}
    theirs, ours = both(model, {"name": optimizer, "ema_decay": 0.9})
    moving = Pupil("cpu", model, {"name": optimizer, "ema_decay": 0.9})
    expected = theirs.losses(60)
    losses = ours.losses(20)
    moving.backend.load(ours.state())
    losses += moving.losses(20, first=20)
    ours.backend.load(moving.state())
    losses += ours.losses(20, first=40)
    assert np.abs(np.subtract(losses, expected)).max() < 1e-3
    assert ours.mean() == pytest.approx(theirs.mean(), abs=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_that_goes_on_is_bitwise_the_unbroken_one(optimizer):
    model = {**MODELS["llama"], "dropout": 0.1}
    unbroken, broken, resumed = (Pupil("mlx", model, {"name": optimizer, "ema_decay": 0.9}) for _ in range(3))
    unbroken.losses(6)
    broken.losses(3)
    resumed.backend.load(broken.state())
    resumed.losses(3, first=3)
    assert resumed.raw() == unbroken.raw()


@pytest.mark.parametrize("prompts", [[[1, 2, 3], [7, 8, 9]], [list(range(20))]], ids=["short", "longer than the context"])
@pytest.mark.parametrize("model", MODELS)
def test_greedy_text_is_torchs_past_the_context_too(model, prompts):
    theirs, ours = both(model)
    theirs.losses(5)
    ours.backend.load(theirs.state())
    greedy = Sampling(temperature=0.0)
    expected = list(islice(theirs.backend.generate(prompts, greedy), 20))  # the context is 16
    assert list(islice(ours.backend.generate(prompts, greedy), 20)) == expected
    assert list(islice(ours.backend.generate(prompts, Sampling(temperature=0.0, use_cache=False)), 20)) == expected


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_greedy_text_of_prompts_of_different_lengths_is_torchs(penalty):
    theirs, ours = both("llama")
    theirs.losses(5)
    ours.backend.load(theirs.state())
    prompts, greedy = [[1, 2, 3], [7], [4, 5, 6, 7, 8]], Sampling(temperature=0.0, repetition_penalty=penalty)
    expected = list(islice(theirs.backend.generate(prompts, greedy), 20))
    assert list(islice(ours.backend.generate(prompts, greedy), 20)) == expected


def test_weights_are_cast_to_what_mlx_computes_in_and_to_nothing_else():
    backend = Pupil("mlx", "llama").backend
    assert not backend.cast("fp16")
    assert backend.cast("bf16") and len(list(islice(backend.generate([[1], [2, 3]], Sampling()), 3))) == 3


def test_a_row_draws_by_its_own_seed_and_only_what_sampling_leaves():
    backend = Pupil("mlx", "gpt2").backend
    two = list(islice(backend.generate([[1], [1]], Sampling(seed=5)), 10))
    one = list(islice(backend.generate([[1]], Sampling(seed=6)), 10))
    assert [row[1] for row in two] == [row[0] for row in one] and [row[0] for row in two] != [row[0] for row in one]
    greedy = list(islice(backend.generate([[1]], Sampling(temperature=0.0)), 10))
    assert list(islice(backend.generate([[1]], Sampling(top_k=1)), 10)) == greedy
    assert list(islice(backend.generate([[1]], Sampling(top_p=1e-9)), 10)) == greedy


def test_what_is_opened_to_be_judged_scores_like_what_was_trained():
    pupil = Pupil("mlx", "golf")
    pupil.step(0)
    judged = open_inference(pupil.config, 40)
    judged.load_weights({record.name: record for record in pupil.backend.weights()}, "here")
    assert judged.score(pupil.rows(1)) == pupil.backend.score(pupil.rows(1))
    assert judged.parameters == pupil.backend.parameters
    other = {record.name: record for record in open_backend(pupil.config, 41, Ranks()).weights()}
    with pytest.raises(CheckpointError, match=r"here: tok_emb\.weight has shape \[41, 32\], but \[40, 32\] in the model"):
        judged.load_weights(other, "here")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_refused_unless_it_is_computed_here(family):
    model = {**SHAPE, "family": family}
    if family in ("gpt2", "llama", "golf", "frontier"):  # as docs/mlx.md promises
        theirs, ours = both(model)
        ours.backend.load(theirs.state())
        assert ours.mean() == pytest.approx(theirs.mean(), abs=1e-5)
    else:
        with pytest.raises(ConfigError, match=rf"model\.family={family} .*training\.device=mlx"):
            Pupil("mlx", model)


def test_a_token_outside_the_vocabulary_is_told():
    pupil = Pupil("mlx", "gpt2")
    with pytest.raises(DataError, match="token 40, outside the vocabulary"):
        pupil.backend.score(np.full((1, 2, 4), 40, np.int32))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"family": "file", "file": "mine.py"}}, r"model\.family=file needs torch; leave training\.device=mlx out"),
        (
            {"training": {"precision": "fp16"}},
            r"training\.precision=fp16 is not supported by training\.device=mlx; use fp32 or bf16",
        ),
        ({"optimizer": {"name": "muon", "muon_precision": "bf16"}}, r"optimizer\.muon_precision=bf16 needs torch; remove it or"),
        ({"training": {"fp8_head": True}}, r"training\.fp8_head=true needs torch; remove it or"),
        (
            {"training": {"deterministic": True}},
            r"training\.deterministic=true needs torch",
        ),
        ({"training": {"kernels": ["loss"]}}, r"training\.kernels=\['loss'\] needs torch"),
        ({"training": {"threads": 1}}, r"training\.threads=1 needs torch"),
    ],
)
def test_what_only_torch_does_is_refused_by_the_name_of_the_setting(sections, said):
    training = {"max_steps": 1, "tokens_per_step": 32, "device": "mlx", **sections.get("training", {})}
    with pytest.raises(ConfigError, match=said):
        open_backend(Config(**{"data": {"seq_len": 16}, **sections, "training": training}), 40, Ranks())


def test_several_ranks_are_refused():
    config = Pupil("mlx", "gpt2").config
    with pytest.raises(ConfigError, match=r"training\.device=mlx .* 2 ranks"):
        open_backend(config, 40, Ranks(0, 2))
    with pytest.raises(ConfigError, match="this run has 2 ranks"):
        open_group(find_device("mlx"), Ranks(1, 2))


def test_what_was_settled_is_kept_with_a_run():
    pupil = Pupil("mlx", "gpt2", micro_batch="auto")
    found = pupil.backend.tuned()
    assert (found["micro_batch"], found["precision"], found["compile"]) == (7, "fp32", False)
    stages = [(plan_step(pupil.config, Position()), pupil.rows(0))]
    pupil.backend.tune(stages, {**found, "micro_batch": 2})
    assert pupil.backend.tuned()["micro_batch"] == 2
    pupil.backend.tune(stages, {**found, "micro_batch": 2, "device": "another"})
    assert pupil.backend.tuned()["micro_batch"] == 7


def test_a_long_validation_needs_the_memory_of_a_short_one():
    import mlx.core as mx

    ours, peaks = Pupil("mlx", "golf"), []
    batch = ours.rows(0)
    for batches in (2, 100):
        mx.clear_cache()
        mx.reset_peak_memory()
        for _ in range(batches):
            ours.backend.score(batch)
        peaks.append(ours.backend.peak_memory()[0])
    assert peaks[1] <= 1.5 * peaks[0]
