"""Weights to files others can use."""
