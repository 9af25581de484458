"""Variables, what they mean to the engine, and what a mistake in one is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from golf_toys import ROOT, Golf, markdown
from hypothesis import given
from hypothesis import strategies as st

import ingot
from ingot.backends.torch.build import build_model
from ingot.compat.golf.translate import ADVICE, accumulation, advice, translate, variable
from ingot.compat.golf.variables import VARIABLES, as_text, differing, look_alikes, read_variables
from ingot.config.loading import load_config
from ingot.errors import CannotContinue, Change, ConfigError, Setting

# The record with rows of 4,096 tokens: its defaults that are not the baseline's, besides its RUN_ID.
SEQ4096 = {
    "WARMDOWN_ITERS": "3000", "TRAIN_BATCH_TOKENS": "393216", "TRAIN_SEQ_LEN": "4096", "TIED_EMBED_LR": "0.030",
    "MATRIX_LR": "0.020", "SCALAR_LR": "0.020", "MUON_MOMENTUM": "0.99", "MUON_MOMENTUM_WARMUP_START": "0.92",
    "MUON_MOMENTUM_WARMUP_STEPS": "1500",
}  # fmt: skip


# -- reading --------------------------------------------------------------------------------------------------------------------


def test_defaults_are_the_baselines() -> None:
    values = read_variables({})
    assert (values["TRAIN_BATCH_TOKENS"], values["MAX_WALLCLOCK_SECONDS"], values["TIED_EMBED_LR"]) == (524_288, 600.0, 0.05)
    assert values["CONTROL_TENSOR_NAME_PATTERNS"] == values["INT8_KEEP_FLOAT_FP32_NAME_PATTERNS"]
    names = "attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,skip_weight,skip_weights"
    assert ",".join(values["CONTROL_TENSOR_NAME_PATTERNS"]) == names
    assert values["RUN_ID"] is None and values["TIE_EMBEDDINGS"] is True


def test_values_are_read_by_the_rules_of_the_original() -> None:
    values = read_variables(
        {
            "ITERATIONS": " 20_000 ",
            "TIE_EMBEDDINGS": "7",
            "ADAM_EPS": "1e-9",
            "CONTROL_TENSOR_NAME_PATTERNS": "a, b,,",
            "SEED": "-0",
        }
    )
    assert (values["ITERATIONS"], values["TIE_EMBEDDINGS"], values["ADAM_EPS"], values["SEED"]) == (20_000, True, 1e-9, 0)
    assert values["CONTROL_TENSOR_NAME_PATTERNS"] == ("a", "b") == values["INT8_KEEP_FLOAT_FP32_NAME_PATTERNS"]
    assert read_variables({"CONTROL_TENSOR_NAME_PATTERNS": ""})["CONTROL_TENSOR_NAME_PATTERNS"] == ()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("TIE_EMBEDDINGS", "true", "TIE_EMBEDDINGS=true must be 0 or 1"),
        ("TIE_EMBEDDINGS", "", "TIE_EMBEDDINGS= must be 0 or 1"),
        ("ITERATIONS", "1e3", "ITERATIONS=1e3 must be a whole number"),
        ("TRAIN_BATCH_TOKENS", "524288.0", "TRAIN_BATCH_TOKENS=524288.0 must be a whole number >= 1"),
        ("MATRIX_LR", "fast", "MATRIX_LR=fast must be a number"),
        ("MATRIX_LR", "nan", "MATRIX_LR=nan must be a number"),
        ("MAX_WALLCLOCK_SECONDS", "nan", "MAX_WALLCLOCK_SECONDS=nan must be a number"),
        ("INT8_RULE", "int6", "INT8_RULE=int6 must be golf or exact"),
        ("EMBED_DTYPE", "fp16", "EMBED_DTYPE=fp16 must be auto, bf16 or fp32"),
    ],
)
def test_what_is_no_value_is_refused_with_its_variable(name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}$"):
        read_variables({name: text})


@given(
    st.fixed_dictionaries(
        {}, optional={v.name: st.text(max_size=8) for v in VARIABLES.values() if v.kind in ("str", "list") and not v.choices}
    )
)
def test_values_written_as_text_are_read_back_the_same(environment: dict[str, str]) -> None:
    values = read_variables(environment)
    assert read_variables({name: as_text(value) for name, value in values.items() if value is not None}) == values


def test_what_differs_from_the_baseline_is_told_without_what_belongs_to_one_run() -> None:
    values = read_variables(SEQ4096 | {"SEED": "3", "RUN_ID": "x", "DATA_PATH": "y", "ITERATIONS": "20000"})
    assert differing(values) == {name: text.rstrip("0") if "." in text else text for name, text in SEQ4096.items()}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ITERATION", "ITERATIONS"),
        ("iterations", "ITERATIONS"),
        ("MATRIXLR", "MATRIX_LR"),
        ("N_LAYERS", "NUM_LAYERS"),
        ("MAX_WALLCLOCK", "MAX_WALLCLOCK_SECONDS"),
        ("SEQ_LEN", "TRAIN_SEQ_LEN"),
        ("MLP_MULTIPLE", "MLP_MULT"),
    ],
)
def test_a_variable_that_looks_like_one_of_ours_is_named_with_it(name: str, meant: str) -> None:
    assert look_alikes({name: "1", "SEED": "1"}) == [f"{name}=1 has no effect; did you mean {meant}?"]


def test_variables_of_records_are_named_as_such_and_everybody_elses_are_not_mentioned() -> None:
    [said] = look_alikes({"EMA_DECAY": "0.9"})
    assert said.startswith("EMA_DECAY ") and "record" in said and "no effect" in said
    others = "PATH HOME _ LANG SHELL PWD TERM RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR OMP_NUM_THREADS"
    others += (
        " CUDA_VISIBLE_DEVICES TOKENIZERS_PARALLELISM SLURM_JOB_ID RUNPOD_POD_ID PYTHONPATH LD_LIBRARY_PATH DATA_DIR NCCL_DEBUG"
    )
    assert look_alikes(dict.fromkeys(others.split(), "1")) == []


def test_a_look_alike_is_warned_about_on_stderr_and_the_run_goes_on(golf: Golf) -> None:
    ran = golf(ITERATIONS="1", MATRIX_RL="0.1")
    assert ran.err == "train_gpt.py: warning: MATRIX_RL=0.1 has no effect; did you mean MATRIX_LR?\n"
    assert ran.value("matrix_lr") == "0.04"


# -- their meaning --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "environment"), [("golf/baseline", {}), ("golf/seq4096", SEQ4096)])
def test_a_recipe_is_the_run_that_its_variables_are_on_a_gpu(recipe: str, environment: dict[str, str]) -> None:
    config = load_config(recipe=recipe, environment={}).config
    assert config == translate(read_variables(environment), on_gpu=True).config
    assert config.training.output_dir is None


def test_every_variable_sets_something_or_is_read_by_the_script() -> None:
    read = {
        "MAX_WALLCLOCK_SECONDS", "EMBED_LR", "INT8_KEEP_FLOAT_FP32_NAME_PATTERNS", "EVAL_ONLY_PATH", "INT8_RULE",
    }  # fmt: skip
    assert {name for name, option in VARIABLES.items() if not option.sets} == read


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({"VAL_LOSS_EVERY": "-5"}, {"evaluation.every": 0, "evaluation.at_start": False}),
        ({"VAL_LOSS_EVERY": "7"}, {"evaluation.every": 7, "evaluation.at_start": True}),
        ({"WARMDOWN_ITERS": "0"}, {"optimizer.schedule": "constant", "optimizer.decay_steps": None}),
        ({"WARMDOWN_ITERS": "-1"}, {"optimizer.schedule": "constant"}),
        ({"WARMDOWN_ITERS": "30"}, {"optimizer.schedule": "warmdown", "optimizer.decay_steps": 30, "optimizer.floor": 0.0}),
        ({"WARMUP_STEPS": "-1"}, {"training.priming_steps": 0}),
        ({"MAX_WALLCLOCK_SECONDS": "0"}, {"budget.seconds": None}),
        ({"MAX_WALLCLOCK_SECONDS": "-1"}, {"budget.seconds": None}),
        ({"MAX_WALLCLOCK_SECONDS": "inf"}, {"budget.seconds": None}),
        ({"MAX_WALLCLOCK_SECONDS": "1.5"}, {"budget.seconds": 1.5, "budget.overshoot": True}),
        ({"MUON_MOMENTUM_WARMUP_STEPS": "0"}, {"optimizer.muon_momentum_start": None}),
        ({"MUON_MOMENTUM_WARMUP_STEPS": "-1"}, {"optimizer.muon_momentum_start": None}),
        ({"GRAD_CLIP_NORM": "-1"}, {"optimizer.clip_norm": 0.0}),
        ({"GRAD_CLIP_NORM": "0.3"}, {"optimizer.clip_norm": 0.3}),
        ({"TIE_EMBEDDINGS": "1"}, {"optimizer.embedding_learning_rate": 0.05, "model.tied": True}),
        ({"TIE_EMBEDDINGS": "0"}, {"optimizer.embedding_learning_rate": 0.6, "model.tied": False}),
        ({"EMBED_LR": "0.5", "TIED_EMBED_LR": "0.1"}, {"optimizer.embedding_learning_rate": 0.1}),
        ({"EMBED_DTYPE": "bf16"}, {"model.embedding_dtype": "bf16"}),
        ({"EMBED_DTYPE": "auto"}, {"model.embedding_dtype": "fp32"}),
        ({"INT8_RULE": "exact"}, {"artifact.quantiser": "int8"}),
        ({"ARTIFACT_LIMIT_BYTES": "0"}, {"budget.artifact_bytes": None}),
        ({"CONTROL_TENSOR_NAME_PATTERNS": "a,b"}, {"model.control": "a,b"}),
        ({"VAL_BATCH_SIZE": "8192"}, {"evaluation.micro_batch": 1}),
    ],
)
def test_variables_with_a_rule_of_their_own(environment: dict[str, str], settings: dict[str, object]) -> None:
    found = translate(read_variables(environment)).config.model_dump()
    assert {path: found[path.split(".")[0]][path.split(".")[1]] for path in settings} == settings


def test_on_a_gpu_the_embedding_is_kept_as_the_original_keeps_it_unless_asked() -> None:
    assert translate(read_variables({}), on_gpu=True).config.model.embedding_dtype == "bf16"
    assert translate(read_variables({"EMBED_DTYPE": "fp32"}), on_gpu=True).config.model.embedding_dtype == "fp32"


@pytest.mark.parametrize(
    ("environment", "parameters"),
    [
        ({}, 17_059_912),
        ({"NUM_LAYERS": "10"}, 18_897_488),
        ({"NUM_LAYERS": "12"}, 22_572_128),
        ({"NUM_LAYERS": "2"}, 4_198_928),
        ({"NUM_LAYERS": "1"}, 2_361_352),
        ({"MLP_MULT": "3"}, 21_778_504),
        ({"TIE_EMBEDDINGS": "0"}, 17_584_200),
        ({"NUM_KV_HEADS": "8"}, 19_419_208),
        ({"NUM_KV_HEADS": "1"}, 15_290_440),
        ({"MODEL_DIM": "256", "NUM_HEADS": "4", "NUM_KV_HEADS": "2", "NUM_LAYERS": "4"}, 2_101_776),
    ],
)
def test_shapes_have_the_parameters_they_are_known_for(environment: dict[str, str], parameters: int) -> None:
    with torch.device("meta"):
        model = build_model(translate(read_variables(environment)).config, 1024)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(("ranks", "steps"), [(1, 8), (2, 4), (3, 3), (4, 2), (5, 2), (6, 2), (7, 2), (8, 1), (9, 1), (64, 1)])
def test_accumulation_is_the_originals_where_it_has_one(ranks: int, steps: int) -> None:
    assert accumulation(ranks) == steps


# -- mistakes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"MODEL_DIM": "510"}, "NUM_HEADS=8 does not divide MODEL_DIM=510"),
        ({"NUM_KV_HEADS": "3"}, "NUM_KV_HEADS=3 does not divide NUM_HEADS=8"),
        ({"NUM_KV_HEADS": "0"}, "NUM_KV_HEADS=0 must be a whole number >= 1"),
        ({"MODEL_DIM": "24"}, "gives heads of size 3; rotary positions need an even size"),
        ({"LOGIT_SOFTCAP": "0"}, r"LOGIT_SOFTCAP=0\.0 must be a number > 0"),
        ({"LOGIT_SOFTCAP": "-3"}, r"LOGIT_SOFTCAP=-3\.0 must be a number > 0"),
        ({"TOKENIZER_PATH": "x.json"}, r"TOKENIZER_PATH=x\.json must be a SentencePiece \.model file"),
        ({"NUM_LAYERS": "0"}, "NUM_LAYERS=0: must be at least 1"),
        ({"ITERATIONS": "-1"}, "ITERATIONS=-1: must be at least 0"),
        ({"SEED": "-1"}, "SEED=-1: must be at least 0"),
        ({"TRAIN_SEQ_LEN": "0"}, "TRAIN_SEQ_LEN=0 must be a whole number >= 1"),
        ({"TRAIN_BATCH_TOKENS": "-8"}, "TRAIN_BATCH_TOKENS=-8 must be a whole number >= 1"),
        (
            {"TRAIN_BATCH_TOKENS": "400000", "TRAIN_SEQ_LEN": "4096"},
            r"TRAIN_BATCH_TOKENS=400000 is not a multiple of 8 x TRAIN_SEQ_LEN=4096.*; nearest valid: 393216 and 425984",
        ),
        ({"TRAIN_BATCH_TOKENS": "100"}, "nearest valid: 8192$"),
        (
            {"VAL_BATCH_SIZE": "16384", "TRAIN_SEQ_LEN": "4096"},
            "VAL_BATCH_SIZE=16384 divided by WORLD_SIZE=1 and GRAD_ACCUM_STEPS=8 is less than one sequence of "
            "TRAIN_SEQ_LEN=4096; give at least 32768",
        ),
        ({"TIED_EMBED_LR": "-1"}, "^TIED_EMBED_LR=-1.0: must be at least 0$"),
        ({"EMBED_LR": "-1", "TIE_EMBEDDINGS": "0"}, "^EMBED_LR=-1.0: must be at least 0$"),
        ({"MUON_MOMENTUM_WARMUP_START": "2"}, "^MUON_MOMENTUM_WARMUP_START=2.0: must be less than 1$"),
        ({"MUON_MOMENTUM": "1"}, "^MUON_MOMENTUM=1.0: must be less than 1$"),
        ({"MATRIX_LR": "inf"}, "^MATRIX_LR=inf must be a number$"),
    ],
)
def test_a_mistake_is_told_in_the_words_of_its_variables(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        translate(read_variables(environment))


@given(
    st.sampled_from(list(VARIABLES.values())),
    st.sampled_from(["-1", "0", "1", "3", "0.5", "nan", "inf", "-inf", "1e30", "", "x", "9" * 20]),
)
def test_whatever_a_variable_is_set_to_it_has_a_meaning_or_a_sentence_with_its_name(variable: object, text: str) -> None:
    name = variable.name  # type: ignore[attr-defined]
    try:
        translate(read_variables({name: text}))
    except ConfigError as error:
        assert name in str(error) and "." not in str(error).split("=")[0]


def test_tokens_that_no_eighth_of_a_step_has_are_left_out_with_a_note(golf: Golf) -> None:
    ran = golf(ITERATIONS="1", TRAIN_BATCH_TOKENS="519")
    assert "note: a step trains on 512 of 519 tokens, to use whole sequences only" in ran.out.splitlines()
    assert ran.value("train_batch_tokens") == "519"
    assert ran.losses == golf(ITERATIONS="1", RUN_ID="whole").losses


def test_errors_of_the_engine_are_put_into_the_words_of_the_door() -> None:
    changes = [Change("model.layers", 3, 4), Change("model.embedding_dtype", "bf16", "fp32")]
    said = CannotContinue("x", changes).render(variable, advice)
    assert said.startswith("x ") and said.endswith("choose another RUN_ID")
    assert ": NUM_LAYERS was 3 and is 4; EMBED_DTYPE was bf16 and is fp32; " in said
    assert Setting("optimizer.muon_momentum_start", 2, "python").render(variable) == "MUON_MOMENTUM_WARMUP_START=2"


def test_advice_that_golf_has_its_own_words_for_is_still_given_by_the_engine() -> None:
    engine = "".join(path.read_text() for path in Path(ingot.__file__).parent.rglob("*.py") if "compat" not in path.parts)
    assert [ours for ours in ADVICE if ours.partition(" or {2}")[0].removesuffix(", and start again") not in engine] == []


@pytest.mark.parametrize("ranks", [{"RANK": "0", "WORLD_SIZE": "0"}, {"RANK": "0", "WORLD_SIZE": "-1"}])
def test_a_world_without_ranks_is_refused(golf: Golf, ranks: dict[str, str]) -> None:
    assert f"WORLD_SIZE={ranks['WORLD_SIZE']}" in golf.refuses(2, **ranks)


@pytest.mark.parametrize("ranks", [{"WORLD_SIZE": "8"}, {"RANK": "0"}, {"RANK": "x", "WORLD_SIZE": "1"}])
def test_half_of_what_torchrun_sets_is_refused(golf: Golf, ranks: dict[str, str]) -> None:
    said = golf.refuses(2, **ranks)
    assert ("RANK" in said and "WORLD_SIZE" in said) or "start ranks with torchrun" in said


@pytest.mark.parametrize("run_id", ["a/b", "..", ".", "/tmp/x", "a\nb"])
def test_a_run_id_that_is_no_file_name_is_refused(golf: Golf, tmp_path: Path, run_id: str) -> None:
    assert golf.refuses(2, RUN_ID=run_id).startswith("RUN_ID=")
    assert list(tmp_path.iterdir()) == []


# -- the page -------------------------------------------------------------------------------------------------------------------


def test_the_page_shows_the_table() -> None:
    assert markdown(VARIABLES.values()) in (ROOT / "docs/golf.md").read_text()


def test_the_page_names_every_defect_of_the_original_that_is_mended() -> None:
    page = (ROOT / "docs/golf.md").read_text()
    assert [f"D{number}" for number in range(1, 21) if f"| D{number} |" not in page] == []
