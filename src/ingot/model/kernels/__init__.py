"""Kernels of our own: a backend switches them on where it has seen them run, and a model is complete without them."""
