"""Experiments: sweeps of runs that differ in a setting or a seed, and statistical comparisons of their scores."""
