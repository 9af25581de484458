import json

import pytest
from golf_kit import BYTE, ROOT

from ingot.compat.golf.export_shards import load_specs
from ingot.errors import ConfigError


def specs(tmp_path, content, **options):
    file = tmp_path / "specs.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return load_specs(file, **options)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"kind": "byte", "vocab_size": 260}, "byte"),
        ({"kind": "pure_byte"}, "byte"),
        ({"kind": "sentencepiece", "vocab_size": 512, "builder": "x:build_pure_byte_tokenizer"}, "sentencepiece_bpe"),
        ({"builder": "a.b:build_pure_byte_tokenizer", "vocab_size": 260}, "byte"),
        ({"builder": "build_sentencepiece_tokenizer", "vocab_size": 9}, "sentencepiece_bpe"),
        ({"dataset_suffix": "byte260"}, "byte"),
        ({"vocab_size": 1024}, "sentencepiece_bpe"),
    ],
)
@pytest.mark.parametrize("wrap", [list, lambda x: {"tokenizers": x}, lambda x: {"tokenizer_specs": x}])
def test_a_kind_is_found_in_golfs_order(tmp_path, record, kind, wrap):
    assert [spec.kind for spec in specs(tmp_path, wrap([record]))] == [kind]


def test_the_specs_beside_the_script_are_golfs_two(tmp_path):
    found = load_specs(ROOT / "data/tokenizer_specs.json")
    assert [(spec.name, spec.dataset, spec.files[0]) for spec in found] == [
        ("sp_bpe_1024", "fineweb10B_sp1024", "fineweb_1024_bpe.model"),
        ("pure_byte_260", "fineweb10B_byte260", "fineweb_pure_byte_260.json"),
    ]
    assert [spec.name for spec in load_specs(ROOT / "data/tokenizer_specs.json", skip_byte=True)] == ["sp_bpe_1024"]


SP = {"vocab_size": 1024}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "lists no tokenizers"),
        ([], "lists no tokenizers"),
        ({"tokenizers": {}}, "lists no tokenizers"),
        ("7", "lists no tokenizers"),
        ("{", "specs.json cannot be read: "),
        (["sp1024"], "tokenizer 1: Input should be a valid"),
        ([{}], "unknown kind"),
        ([{"kind": "char"}], "unknown kind 'char'"),
        ([{"builder": "mine:build_it", "vocab_size": 9}], "unknown kind 'build_it'"),
        ([SP, SP], "uses the tokenizer name sp_bpe_1024 twice"),
        ([SP, {**SP, "name": "b"}], "uses the dataset name fineweb10B_sp1024 twice"),
        ([SP, {**SP, "name": "b", "dataset_suffix": "b"}], "uses the file name fineweb_1024_bpe.model twice"),
        ([{**SP, "vocab_sise": 1}], "vocab_sise=1: Extra inputs are not permitted"),
        ([{**SP, "text_transform": "caps"}], "text_transform='caps': Extra inputs are not permitted"),
        ([{"vocab_size": "1024"}], "vocab_size='1024'"),
        ([{"vocab_size": 65_537}], "vocab_size=65537"),
        ([{"vocab_size": True}], "vocab_size=True"),
        ([{"kind": "byte", "vocab_size": 256}], "vocab_size of a byte tokenizer must be 260, not 256"),
        ([{**SP, "dataset_suffix": "../x"}], "dataset_suffix='../x'"),
        ([{**SP, "model_prefix": "/etc/x"}], "model_prefix='/etc/x'"),
        ([{**SP, "name": ""}], "name=''"),
        ([{**SP, "tokenizer_train_docs": 0}], "tokenizer_train_docs=0"),
        ([{**SP, "trainer_overrides": [1]}], "trainer_overrides=\\[1\\]"),
    ],
)
def test_specs_that_make_no_sense_are_refused_in_one_line(tmp_path, content, said):
    with pytest.raises(ConfigError, match=said) as caught:
        specs(tmp_path, content)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (["1024=a", "1024=b"], "two models for the vocabulary size 1024"),
        (["a"], "must be VOCAB=MODEL"),
        (["=a"], "must be VOCAB=MODEL"),
        (["1024="], "must be VOCAB=MODEL"),
        (["-1=a"], "must be VOCAB=MODEL"),
        (["512=a"], "lists no SentencePiece tokenizer of this vocab_size"),
    ],
)
def test_models_to_be_used_again_are_named_once_and_fit_a_spec(tmp_path, pairs, said):
    with pytest.raises(ConfigError, match=said):
        specs(tmp_path, [SP], reuse=pairs)


def test_nothing_left_after_skipping_byte_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nothing is left to export"):
        specs(tmp_path, [BYTE], skip_byte=True)
    with pytest.raises(ConfigError, match=r"missing.json cannot be read: No such file"):
        load_specs(tmp_path / "missing.json")
