import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from ingot.model.gpt2 import GPT2
from ingot.model.registry import build

SETTINGS = {
    "family": "file",
    "layers": 2,
    "heads": 2,
    "width": 16,
    "context": 8,
    "vocab_size": 10,
    "dropout": 0.0,
    "settings": {},
}
GOOD = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, vocab_size, width, twist=1):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size)
        self.twist = twist

    def forward(self, tokens, targets=None):
        logits = self.head(self.embedding(tokens))
        return logits if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


@pytest.fixture
def make(tmp_path):
    def build_file(source, **settings):
        file = tmp_path / "mine.py"
        file.write_text(source)
        return build({**SETTINGS, "file": str(file), "settings": settings})

    return build_file


def test_a_family_is_built_by_its_name():
    model = build({"family": "gpt2", "layers": 1, "heads": 2, "width": 16, "context": 8, "vocab_size": 10, "dropout": 0.0})
    assert isinstance(model, GPT2)
    assert model(torch.zeros(1, 8, dtype=torch.long)).shape == (1, 8, 10)


def test_a_model_of_ones_own_is_given_the_settings_it_names(make):
    model = make(GOOD)
    assert (model.embedding.num_embeddings, model.embedding.embedding_dim, model.twist) == (10, 16, 1)


def test_more_settings_reach_the_constructor(make):
    assert make(GOOD, twist=3).twist == 3


def test_a_constructor_that_takes_everything_is_given_everything(make):
    source = "from torch import nn\nclass Model(nn.Module):\n    def __init__(self, **given):\n"
    model = make(source + "        super().__init__()\n        self.given = given\n", more=1)
    assert model.given == {"layers": 2, "heads": 2, "width": 16, "context": 8, "vocab_size": 10, "dropout": 0.0, "more": 1}


def test_a_function_called_model_will_do(make):
    assert isinstance(make("from torch import nn\ndef Model(width): return nn.Linear(width, width)\n"), nn.Linear)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"model\.file=.*nowhere\.py does not exist"):
        build({**SETTINGS, "file": str(tmp_path / "nowhere.py")})


def test_a_file_that_is_no_python_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text(GOOD)
    with pytest.raises(ValueError, match=r"must end in \.py"):
        build({**SETTINGS, "file": str(tmp_path / "mine.txt")})


def test_a_syntax_error_is_told_with_its_line(make):
    with pytest.raises(ValueError, match=r"mine\.py.*SyntaxError.*line 2"):
        make("x = 1\ndef Model(:\n")


def test_an_error_while_importing_is_told_with_its_line(make):
    with pytest.raises(ValueError, match=r"mine\.py:3 cannot be imported: ZeroDivisionError"):
        make("x = 0\n\ny = 1 / x\n")


def test_an_error_while_importing_a_relative_path_is_told_with_its_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("x = 0\n\ny = 1 / x\n")
    with pytest.raises(ValueError, match=r"model\.file=mine\.py:3 cannot be imported: ZeroDivisionError"):
        build({**SETTINGS, "file": "mine.py"})


def test_an_import_that_is_missing_is_told(make):
    with pytest.raises(ValueError, match=r"No module named 'no_such_thing'"):
        make("import no_such_thing\n")


@pytest.mark.parametrize("source", ["", "Model = 5\n", "class model: pass\n"])
def test_a_file_without_a_class_model_is_refused(make, source):
    with pytest.raises(ValueError, match=r"has no class Model"):
        make(source)


def test_a_parameter_nobody_gives_is_named(make):
    with pytest.raises(ValueError, match=r"Model\(\) needs 'depth'; .*--model\.settings\.depth"):
        make("from torch import nn\nclass Model(nn.Module):\n    def __init__(self, width, depth): super().__init__()\n")


def test_a_setting_the_constructor_does_not_take_is_named(make):
    with pytest.raises(ValueError, match=r"'twits'.*twist, vocab_size, width"):
        make(GOOD, twits=3)


def test_a_model_that_is_not_a_module_is_refused(make):
    with pytest.raises(ValueError, match=r"not a torch\.nn\.Module"):
        make("class Model: pass\n")


def test_an_error_in_the_constructor_names_the_file(make):
    source = "from torch import nn\nclass Model(nn.Module):\n    def __init__(self, width):\n"
    with pytest.raises(ValueError, match=r"mine\.py.*ZeroDivisionError"):
        make(source + "        super().__init__()\n        self.x = width / 0\n")


def test_two_files_of_one_name_are_two_models(tmp_path):
    for folder, size in (("a", 3), ("b", 5)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"from torch import nn\ndef Model(): return nn.Linear({size}, 1)\n")
    widths = [build({**SETTINGS, "file": str(tmp_path / folder / "mine.py")}).in_features for folder in "ab"]
    assert widths == [3, 5]


@pytest.mark.parametrize("code", ["0", "1", "'bye'"])
def test_a_file_that_ends_the_program_is_a_mistake_whatever_code_it_gives(make, code):
    with pytest.raises(ValueError, match=r"mine\.py:2 cannot be imported: SystemExit"):
        make(f"import sys\nsys.exit({code})\n")
    source = "import sys\nfrom torch import nn\nclass Model(nn.Module):\n    def __init__(self, width):\n"
    with pytest.raises(ValueError, match=r"mine\.py:5.*cannot be built: SystemExit"):
        make(f"{source}        sys.exit({code})\n")


@pytest.mark.parametrize("source", [GOOD, GOOD + "\nraise RuntimeError"])
def test_nothing_is_left_beside_a_users_file(make, tmp_path, monkeypatch, source):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    with nullcontext() if source == GOOD else pytest.raises(ValueError, match="cannot be imported"):
        make(source)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"] and not sys.dont_write_bytecode
