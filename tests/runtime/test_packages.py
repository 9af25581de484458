"""Which versions a run is said to be of."""

import numpy as np

from ingot.backends.open import packages
from ingot.runtime.machine import OF_KERNELS, installed


def test_versions_are_told_of_what_is_installed_alone():
    assert installed(["numpy", "no-such-package"]) == {"numpy": np.__version__}


def test_a_run_tells_the_versions_of_what_its_device_computes_with():
    assert packages("auto") == ("torch", "numpy", "pydantic", *OF_KERNELS)
    assert packages("mlx") == ("torch", "numpy", "pydantic", "mlx")
    assert installed(packages("cpu")).keys() >= {"torch", "numpy", "pydantic"}
