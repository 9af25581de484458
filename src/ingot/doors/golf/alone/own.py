"""In place of ingot.model.own: a model of one's own that was built before, so that nothing is explained."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Mapping
from typing import Any

from torch import nn


def build_own(settings: Mapping[str, Any]) -> nn.Module:
    """The model of a `model` section that names a file."""
    model_class = runpy.run_path(settings["file"], run_name="own_model")["Model"]
    names = inspect.signature(model_class).parameters
    return model_class(**{name: value for name, value in settings.items() if name in names})
