"""Experiments: many runs that differ in a setting or a seed, and what their scores say together."""
