"""Build a model from the name of a family or from a Python file (a custom model).

A model is any `nn.Module` whose `forward(tokens)` returns logits (B, T, V) and whose `forward(tokens, targets)` returns the
mean loss over the targets that are not -1. `forward` may take a third argument `documents`, for document masking. These
attributes are optional: `blocks` (for Muon and gradient checkpointing), `control` (substrings of the names of parameters that
Muon does not treat as matrices), `context`, `loss_chunk`, `set` (called with the values that a stage sets), `windowed` (True if
attention uses a mask), `make_ready` (called with the tokens before a compiled forward pass, to compute what should not be part
of its graph), and `new_cache` with `hidden` and `logits` (for cached generation).
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ingot.model.frontier import Frontier
from ingot.model.golf import Golf
from ingot.model.gpt2 import GPT2
from ingot.model.llama import Llama

MODULE_PREFIX = "ingot_model_"  # users' files are imported as modules whose names have this prefix

FAMILIES: dict[str, Any] = {"gpt2": GPT2, "llama": Llama, "golf": Golf, "frontier": Frontier}
OURS: tuple[Any, ...] = tuple(FAMILIES.values())


def build(settings: Mapping[str, Any]) -> nn.Module:
    """Build a model from the `model` section; raise ValueError, naming the file, if a custom model cannot be built."""
    if settings["family"] != "file":
        return FAMILIES[settings["family"]](**{name: value for name, value in settings.items() if name != "family"})
    standard = {name: value for name, value in settings.items() if name not in ("family", "file", "settings")}
    file, extra = settings["file"], settings["settings"]
    model_class = load_class(file)
    parameters = inspect.signature(model_class).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    init, bases = getattr(model_class, "__init__", None), getattr(model_class, "__mro__", ())
    if family := next((base for base in bases if "Settings" in vars(base) and init is base.__init__), None):
        names, takes_all = names | set(family.Settings.model_fields), False  # Model has the constructor of a built-in family
    if unknown := [name for name in extra if name not in names and not takes_all]:
        raise ValueError(
            f"model.file={file}: Model() takes no argument {unknown[0]!r}; its arguments are {', '.join(sorted(names))}"
        )
    # Pass the standard settings that the constructor accepts, and everything in `model.settings`.
    arguments = {name: value for name, value in standard.items() if takes_all or name in names} | dict(extra)
    required = [p.name for p in parameters if p.default is p.empty and p.name in names]
    if missing := [name for name in required if name not in arguments]:
        raise ValueError(f"model.file={file}: Model() needs {missing[0]!r}; set it with --model.settings.{missing[0]} VALUE")
    try:
        model = model_class(**arguments)
    except (Exception, SystemExit) as error:  # a file that calls exit() has failed, even with exit code 0
        raise ValueError(
            f"model.file={error_location(file, error)}: Model cannot be built: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"model.file={file}: Model is not a torch.nn.Module")
    return model


def load_class(file: str) -> Callable[..., nn.Module]:
    """Import a Python file and return its class Model; raise ValueError if the import fails or there is no such class."""
    path = Path(os.path.expanduser(file)).absolute()  # noqa: PTH111 (Path.expanduser raises for an unknown user)
    if not path.is_file():
        raise ValueError(f"model.file={file} does not exist; set it to the path of a Python file with a class Model")
    spec = importlib.util.spec_from_file_location(f"{MODULE_PREFIX}{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"model.file={file} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module in sys.modules
    dont_write, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # do not create __pycache__ next to a user's file
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"model.file={error_location(file, error)} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.dont_write_bytecode = dont_write
    if not callable(getattr(module, "Model", None)):
        raise ValueError(f"model.file={file} has no class Model")
    return module.Model


def error_location(file: str, error: BaseException) -> str:
    """Return the name of the file, followed by the line number if the error was raised in it."""
    path = str(Path(file).absolute())
    frames = inspect.getinnerframes(error.__traceback__, context=0) if error.__traceback__ else []
    line = next((frame.lineno for frame in reversed(frames) if frame.filename == path), None)
    return f"{file}:{line}" if line else file
