"""Benchmarks are programs, not a package: their folder is put on the path as Python does when one is started."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
torch.set_num_threads(1)
