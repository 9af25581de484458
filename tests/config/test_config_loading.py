"""Merging of recipe, file, environment, command line and Python into one Config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ingot.config.loading import ResolvedConfig, load_config
from ingot.errors import ConfigError

ENDS = {"training.max_steps": "500"}  # the least a run needs


def load(overrides: dict[str, Any] | None = None, **sources: Any) -> ResolvedConfig:
    sources.setdefault("environment", {})
    return load_config(overrides={**ENDS, **(overrides or {})}, **sources)


def error_of(overrides: dict[str, Any] | None = None, **sources: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(overrides, **sources)
    message = str(caught.value)
    assert "\n" not in message and "Value error" not in message and "pydantic" not in message
    return message


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_each_source_wins_over_the_ones_before_it(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "model: {layers: 3, heads: 3, width: 9, context: 300, dropout: 0.3}\n")
    resolved = load(
        {"model.width": "12", "model.context": "400", "model.dropout": "0.5"},
        recipe="shakespeare-char",
        file=file,
        environment={"INGOT_MODEL__HEADS": "4", "INGOT_MODEL__WIDTH": "16", "INGOT_CACHE": "x"},
        python={"model": {"context": 500}, "model.dropout": 0.6},
    )
    model, origins = resolved.config.model, resolved.origins
    assert (model.layers, model.heads, model.width, model.context, model.dropout) == (3, 4, 12, 500, 0.6)
    assert origins["model.bias"] == "recipe shakespeare-char"
    assert origins["model.layers"] == f"file {file}"
    assert origins["model.heads"] == "environment INGOT_MODEL__HEADS"
    assert origins["model.width"] == "command line"
    assert origins["model.context"] == origins["model.dropout"] == "python"
    assert origins["training.seed"] == "default"


def test_every_setting_has_an_origin() -> None:
    resolved = load(recipe="shakespeare-char")
    paths = {f"{section}.{key}" for section, keys in resolved.config.model_dump().items() for key in keys}
    assert set(resolved.origins) == paths


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("optimizer.learning_rate", "3e-4", 3e-4),
        ("optimizer.learning_rate", "1", 1.0),
        ("training.max_steps", "1e3", 1000),
        ("training.max_steps", "1_000", 1000),
        ("training.output_dir", "none", None),
        ("training.output_dir", "123", "123"),
        ("data.path", "123", "123"),
        ("data.path", "true", "true"),
        ("evaluation.sample_prompt", "null", "null"),
        ("evaluation.sample_prompt", "[a: b]", "[a: b]"),
        ("data.tokenizer", "null", None),
        ("data.tokenizer", "char", "char"),
        ("model.bias", "false", False),
        ("model.bias", "1", True),
        ("training.compile", "true", True),
        ("training.compile", "auto", "auto"),
        ("training.micro_batch", "8", 8),
        ("training.micro_batch", "auto", "auto"),
    ],
)
def test_words_of_command_line_and_environment_mean_what_their_setting_makes_of_them(path: str, text: str, value: Any) -> None:
    section, key = path.split(".")
    variable = {f"INGOT_{section}__{key}".upper(): text}
    from_words = load_config(overrides={"budget.seconds": "1", "optimizer.schedule": "budget", path: text}, environment={})
    from_variable = load_config(overrides={"budget.seconds": "1", "optimizer.schedule": "budget"}, environment=variable)
    for resolved in (from_words, from_variable):
        found = getattr(getattr(resolved.config, section), key)
        assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("yaml", "path", "value"),
    [
        ("optimizer: {learning_rate: 3e-4}", "optimizer.learning_rate", 3e-4),
        ('optimizer: {learning_rate: "3e-4"}', "optimizer.learning_rate", 3e-4),
        ("optimizer: {learning_rate: 1}", "optimizer.learning_rate", 1.0),
        ("data: {path: 2024-01-01}", "data.path", "2024-01-01"),
        ("data: {path: 007}", "data.path", "007"),
        ("training: {output_dir: }", "training.output_dir", None),
        ('training: {output_dir: "none"}', "training.output_dir", "none"),
        ("evaluation: {sample_prompt: |\n  two\n  lines\n}", None, None),
        ("evaluation:\n  sample_prompt: |\n    two\n    lines\n", "evaluation.sample_prompt", "two\nlines\n"),
        ("optimizer.learning_rate: 0.5", "optimizer.learning_rate", 0.5),
    ],
)
def test_yaml_values_mean_what_their_setting_makes_of_them(tmp_path: Path, yaml: str, path: str | None, value: Any) -> None:
    file = write(tmp_path / "c.yaml", yaml)
    if path is None:
        assert "line" in error_of(file=file)
        return
    section, key = path.split(".")
    found = getattr(getattr(load(file=file).config, section), key)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "optimizer:\n", "\ufefftraining:\n", "optimizer: {}\nbase: null\n"])
def test_an_empty_file_or_section_leaves_the_defaults(tmp_path: Path, text: str) -> None:
    assert load(file=write(tmp_path / "c.yaml", text)).config == load().config


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("model: {layers: 0}", "model.layers=0 (file FILE): must be at least 1"),
        ("model: {layers: abc}", "model.layers=abc (file FILE): must be an integer >= 1"),
        ("model: {layers: true}", "model.layers=true (file FILE): must be an integer >= 1"),
        ("model: {layers: 2.5}", "model.layers=2.5 (file FILE): must be an integer >= 1"),
        ("model: {layers: [1]}", "model.layers=[1] (file FILE): must be an integer >= 1"),
        ("model: {layers: {a: 1}}", "model.layers={a: 1} (file FILE): must be an integer >= 1"),
        ("model: {dropout: 1}", "model.dropout=1 (file FILE): must be less than 1"),
        ("model: {bias: 3}", "model.bias=3 (file FILE): must be true or false"),
        ("data: {path: null}", "data.path=null (file FILE): must be text"),
        ("optimizer: {learning_rate: .inf}", "optimizer.learning_rate=.inf (file FILE): must be a finite number"),
        ("optimizer: {name: adam}", "optimizer.name=adam (file FILE): must be adamw or muon"),
        ("training: {micro_batch: 0}", "training.micro_batch=0 (file FILE): must be an integer >= 1 or auto"),
        ("budget: {seconds: 0}", "budget.seconds=0 (file FILE): must be greater than 0"),
        ("optimizer: 3", "optimizer (file FILE) is a section; set one of its settings, such as optimizer.name"),
        ("optimiser: {name: muon}", "unknown setting optimiser.name (file FILE); did you mean optimizer.name?"),
        (
            "optimizer: {learning_rat: 1}",
            "unknown setting optimizer.learning_rat (file FILE); did you mean optimizer.learning_rate?",
        ),
        ("learning_rate: 1", "unknown setting learning_rate (file FILE); did you mean optimizer.learning_rate?"),
        ("data: {seed: 1}\ndata: {seed: 2}", "FILE line 2: data is written twice; keep one"),
        ("data: {seed: 1}\ndata.seed: 2", "data.seed is set twice (file FILE); keep one"),
        ("a: b: c", "FILE is not valid YAML (line 1): mapping values are not allowed here"),
        ("data:\n\tseed: 1", "FILE is not valid YAML (line 2): found character '\\t' that cannot start any token"),
        ("- data", "FILE is not a config: it needs sections such as `training:` with settings below them"),
        ("data: !!python/object:os.system {}", "FILE is not valid YAML (line 1): could not determine a constructor for the tag"),
        ("data: &d {seed: 1}\noptimizer: *d", "FILE line 2: aliases (*name) are not supported"),
        ("base: [demo]", "base (file FILE) must be the name of a recipe or a YAML file"),
        ("base: demmo", "unknown recipe demmo; did you mean demo?"),
        ("base: other.yaml", "does not exist"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_with_its_place_and_what_is_allowed(tmp_path: Path, yaml: str, message: str) -> None:
    file = write(tmp_path / "c.yaml", yaml)
    assert message.replace("FILE", str(file)) in error_of(file=file)


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    assert "`ingot init -o" in error_of(file=tmp_path / "missing.yaml")
    assert (
        error_of(file=tmp_path)
        == f"{tmp_path} cannot be read: it is not a regular file; give a YAML file, such as a run's config.yaml"
    )
    (tmp_path / "latin.yaml").write_bytes(b"data: {path: caf\xe9}\n")
    assert "is not UTF-8 text (byte 16)" in error_of(file=tmp_path / "latin.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"data: \x00\n")
    assert "is not valid YAML" in error_of(file=tmp_path / "binary.yaml")
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    assert error_of(file=tmp_path / "loop.yaml").endswith("; give a YAML file")
    write(tmp_path / "deep.yaml", "[" * 5000)
    assert "nested too deeply" in error_of(file=tmp_path / "deep.yaml")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "optimizer.learning_rat",
            "unknown setting optimizer.learning_rat (command line); did you mean optimizer.learning_rate?",
        ),
        ("optimizer.max_steps", "did you mean training.max_steps?"),
        ("optimizer.seed", "did you mean data.seed or training.seed?"),
        ("trainin.seed", "did you mean training.seed?"),
        ("learning_rate", "unknown setting learning_rate (command line); did you mean optimizer.learning_rate?"),
        ("learning_rat", "did you mean optimizer.learning_rate?"),
        ("training.seed.more", "did you mean training.seed?"),
        ("training", "training (command line) is a section"),
        ("xyzzy.plugh", "unknown setting xyzzy.plugh (command line); `ingot config schema` lists all settings"),
    ],
)
def test_an_unknown_setting_is_an_error_that_suggests_the_right_one(path: str, message: str) -> None:
    assert message in error_of({path: "1"})


def test_an_unknown_environment_variable_is_an_error_that_suggests_the_right_one() -> None:
    message = error_of(environment={"INGOT_TRAINING__SED": "1"})
    assert message == "unknown setting training.sed (environment INGOT_TRAINING__SED); did you mean training.seed?"


def test_all_mistakes_are_reported_at_once() -> None:
    message = error_of({"model.layers": "0", "model.widht": "3", "training.seed": "x"})
    assert [part.split()[0] for part in message.split("; ")] == ["unknown", "did", "model.layers=0", "training.seed=x"]


def test_values_that_do_not_fit_together_are_an_error_after_all_overrides() -> None:
    assert error_of({"model.heads": "5"}, recipe="shakespeare-char").startswith(
        "model.heads=5 does not divide model.width=384; the nearest"
    )
    assert error_of({"data.seq_len": "300"}).startswith(
        "training.tokens_per_step=16,384 is not a multiple of data.seq_len=300; the nearest"
    )
    assert load({"model.heads": "5", "model.width": "10"}, recipe="shakespeare-char").config.model.width == 10


def test_a_run_without_any_source_that_ends_it_is_pointed_to_the_recipes() -> None:
    with pytest.raises(ConfigError, match=r"^this run would never end: .*`ingot recipes`$"):
        load_config(environment={})


def test_a_model_file_over_a_recipe_drops_what_the_recipe_set_for_its_family() -> None:
    resolved = load({"model.file": "mine.py", "model.settings.depth": "3"}, recipe="shakespeare-char")
    model = resolved.config.model.model_dump()
    assert "bias" not in model and "gelu" not in model
    assert (model["family"], model["file"], model["layers"], model["settings"]) == ("file", "mine.py", 6, {"depth": 3})
    assert resolved.origins["model.family"] == resolved.origins["model.settings.depth"] == "command line"


def test_a_setting_of_another_family_is_an_error_where_the_family_is_chosen_or_later(tmp_path: Path) -> None:
    message = "model.bias (command line) is a setting of model.family=gpt2 or llama, not of file"
    assert error_of({"model.file": "mine.py", "model.bias": "true"}) == message
    file = write(tmp_path / "c.yaml", "model: {file: mine.py}")
    assert error_of({"model.bias": "true"}, file=file) == message
    variables = {"INGOT_MODEL__FILE": "mine.py", "INGOT_MODEL__BIAS": "true"}
    assert "(environment INGOT_MODEL__BIAS)" in error_of(environment=variables)
    assert "is a setting of model.family=file, not of gpt2" in error_of({"model.settings.depth": "1"})


def test_a_later_source_may_return_to_the_first_family(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "model: {file: mine.py, layers: 2, settings: {depth: 1}}")
    model = load({"model.family": "gpt2"}, file=file).config.model.model_dump()
    assert (model["family"], model["layers"]) == ("gpt2", 2) and "file" not in model


@pytest.mark.parametrize("family", ["gpt2", "llama", "golf"])
def test_a_family_over_a_recipe_of_another_one_keeps_only_what_all_families_have(family: str) -> None:
    assert load({"model.family": "frontier"}, recipe="demo").config.model.tied is False  # the recipe's own family
    model = load({"model.family": family, "model.heads": "4"}, recipe="demo").config.model
    expected = {"family": family, "layers": 2, "heads": 4, "width": 96}
    assert model == type(model)(**expected)


def test_a_family_named_together_with_a_file_must_be_the_one_for_files() -> None:
    assert load({"model.family": "file", "model.file": "mine.py"}).config.model.family == "file"
    assert "model.file (command line) is a setting of" in error_of({"model.family": "gpt2", "model.file": "mine.py"})
    assert "model.file is not set (" in error_of({"model.family": "file"})
    assert error_of({"model.family": "lama"}) == "model.family=lama (command line): must be gpt2, llama, golf, frontier or file"


def test_entries_of_a_free_form_mapping_are_merged_one_by_one(tmp_path: Path) -> None:
    file = write(
        tmp_path / "c.yaml", "model:\n  file: mine.py\n  settings: {depth: 1, norm: {kind: rms, eps: 1e-6}, name: 'null'}"
    )
    resolved = load({"model.settings.norm.eps": "1e-5", "model.settings.sizes": "[1, 2.5, none, 'x']"}, file=file)
    expected = {"depth": 1, "norm": {"kind": "rms", "eps": 1e-5}, "name": "null", "sizes": [1, 2.5, None, "x"]}
    assert resolved.config.model.model_dump()["settings"] == expected
    assert resolved.origins["model.settings.norm.kind"] == f"file {file}"
    assert resolved.origins["model.settings.norm.eps"] == "command line"


def test_a_free_form_mapping_may_be_given_as_one_word_but_must_be_a_mapping(tmp_path: Path) -> None:
    resolved = load({"model.file": "mine.py", "model.settings": "{depth: 3, wide: true}"})
    assert resolved.config.model.model_dump()["settings"] == {"depth": 3, "wide": True}
    assert "model.settings=3 (command line): must be a mapping" in error_of({"model.file": "mine.py", "model.settings": "3"})
    assert error_of({"data.mix": "{a:1}"}) == "data.mix={a:1: null} (command line): must be a mapping of names to numbers"
    file = write(tmp_path / "c.yaml", "model: {family: file, file: mine.py, settings: {a: 1}}\ndata: {mix: {a: 1, b: x}}")
    assert "model.settings=3 (command line): must be a mapping" in error_of({"model.settings": "3"}, file=file)
    assert f"(file {file}): must be a mapping of names to numbers" in error_of({"data.mix.a": "2"}, file=file)
    assert "must be plain data" in error_of(python={"model": {"file": "m.py", "settings": {"x": object()}}})


def test_python_may_give_paths_tuples_and_flags() -> None:
    given = {"training": {"output_dir": Path("a/b")}, "model": {"file": Path("m.py"), "settings": {"sizes": (1, 2)}}}
    config = load({"training.gradient_checkpointing": True}, python=given).config
    assert (config.training.output_dir, config.training.gradient_checkpointing) == (str(Path("a/b")), True)
    assert config.model.model_dump()["settings"] == {"sizes": [1, 2]}


def test_bases_are_inherited_along_the_chain_and_name_the_run(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "first.yaml", "base: shakespeare-char\nmodel: {layers: 2}\ndata: {seed: 5}\n")
    file = write(tmp_path / "second.yaml", "base: sub/first.yaml\nmodel: {layers: 3}\n")
    resolved = load(file=file)
    assert (resolved.config.model.layers, resolved.config.data.seed, resolved.config.model.width) == (3, 5, 384)
    assert resolved.origins["data.seed"] == f"file {tmp_path / 'sub' / 'first.yaml'}"
    assert resolved.origins["model.width"] == "recipe shakespeare-char"
    assert resolved.recipe == "second"
    assert load(file=tmp_path / "sub" / "first.yaml").recipe == "shakespeare-char"
    assert load(recipe="shakespeare-char").recipe == "shakespeare-char"
    assert load(file=write(tmp_path / "plain.yaml", "")).recipe == "plain"
    assert load(file=tmp_path / "plain.yaml", recipe="shakespeare-char").recipe == "shakespeare-char"
    assert load().recipe is None


def test_bases_in_a_cycle_are_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "base: b.yaml")
    write(tmp_path / "b.yaml", "base: ./a.yaml")
    assert "cycle: a.yaml -> b.yaml -> a.yaml" in error_of(file=file)


def test_a_recipe_and_a_file_with_a_base_are_too_much(tmp_path: Path) -> None:
    message = error_of(file=write(tmp_path / "c.yaml", "base: demo"), recipe="gpt2")
    assert "recipe demo, so it cannot be combined with the recipe gpt2" in message


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model.layers", 1001), ("model.layers", 10**30), ("model.width", 2**31), ("model.heads", 10**20),
        ("model.context", 10**20), ("model.vocab_size", 10**20), ("data.seq_len", 2**31), ("data.epochs", 10**20),
        ("data.spans", 10**20), ("optimizer.muon_iterations", 101), ("optimizer.learning_rate", 1e300),
        ("optimizer.warmup_steps", 10**20),
        ("training.max_steps", 10**20), ("training.tokens_per_step", 10**20), ("training.priming_steps", 10**12),
        ("training.keep_every", 10**20), ("evaluation.sample_tokens", 10**12), ("evaluation.temperature", 1e300),
        ("evaluation.micro_batch", 10**20),
    ],
)  # fmt: skip
def test_numbers_beyond_64_bits_or_sense_are_refused_and_not_tried(setting, value):
    assert setting in error_of({setting: str(value)})
    assert setting in error_of(python={setting: value})


@pytest.mark.parametrize("setting", ["qk_gain", "softcap", "rope_base", "embedding_std"])
def test_numbers_that_float32_does_not_hold_are_refused(setting):
    assert error_of({"model.family": "golf", f"model.{setting}": "1e300"}).endswith("must be at most 1e+30")
