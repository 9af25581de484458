"""Which models other programs' files hold, as the schema says it of every setting."""

import re
import typing

import pytest
from portable_kit import random_model, settings_of

from ingot.artifact.gguf import write_gguf
from ingot.artifact.huggingface import portable_values, refuse_unportable, write_model
from ingot.backends.torch.state import model_records
from ingot.config.render import json_schema
from ingot.config.schema import FAMILIES
from ingot.data.tokenizers import ByteTokenizer
from ingot.errors import ConfigError

FORMATS = ("huggingface", "gguf")
PORTABLE = ("gpt2", "llama")


def words_of(family, name):
    """The words that a setting may be, where the schema lists them; true and false count as words."""
    told = FAMILIES[family].model_json_schema()["properties"][name]
    parts = told.get("anyOf", [told])
    if any(part.get("type") == "boolean" for part in parts):
        return [True, False]
    words = [word for part in parts for word in part.get("enum", [part["const"]] if "const" in part else [])]
    return words + [None] * (bool(words) and any(part.get("type") == "null" for part in parts))


CASES = [
    (target, family, name, word)
    for target in FORMATS
    for family in PORTABLE
    for name in FAMILIES[family].model_fields
    for word in words_of(family, name)
]


@pytest.mark.parametrize("family", PORTABLE)
def test_every_setting_says_in_which_files_it_has_a_place(family):
    for name, field in FAMILIES[family].model_fields.items():
        told = (field.json_schema_extra or {}).get("portable")
        assert told is not None and set(told) == set(FORMATS), name
        for values in told.values():
            assert values == "any" or (values and set(values) <= {*words_of(family, name), *FAMILIES}), name


@pytest.mark.parametrize(("target", "family", "name", "word"), CASES)
def test_a_word_is_refused_by_its_name_with_what_would_do_or_has_a_place(target, family, name, word):
    values = portable_values(FAMILIES[family], name, target)
    settings = settings_of(family, **({} if name == "family" else {name: word}))
    if values is None or word in values:
        refuse_unportable(settings, target)
        return
    told = re.escape(f"model.{name}={word} is not supported by")
    with pytest.raises(ConfigError, match=rf"{told} .*; only {re.escape(str(values[0]))}.*; --format ingot supports any model"):
        refuse_unportable(settings, target)


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in PORTABLE])
def test_other_families_are_refused_by_name(target, family):
    required = {"file": "mine.py"} if family == "file" else {}
    with pytest.raises(ConfigError, match=rf"model\.family={family} is not supported by .*; only gpt2 and llama;"):
        refuse_unportable({**settings_of(family, **required)}, target)


def test_a_setting_that_says_nothing_is_refused():
    """Whoever adds a setting decides where it has a place."""
    assert portable_values(FAMILIES["golf"], "softcap", "gguf") == []


def test_nothing_is_written_of_a_model_that_is_refused(tmp_path):
    settings = settings_of("llama", norm="layernorm")
    records = model_records(random_model(settings))
    for write in (write_model, write_gguf):
        with pytest.raises(ConfigError, match=r"model\.norm=layernorm"):
            write(tmp_path / "out", records, settings, ByteTokenizer().spec())
    assert not list(tmp_path.iterdir())


def test_editors_see_it_in_the_json_schema():
    schema = typing.cast("dict", json_schema())["$defs"]["GPT2Settings"]["properties"]["gelu"]
    assert schema["portable"] == {"huggingface": ["tanh", "erf"], "gguf": ["tanh"]}
