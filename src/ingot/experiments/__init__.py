"""Experiments: sweeps over settings and seeds, and statistical comparison of their scores."""
