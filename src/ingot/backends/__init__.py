"""Backends: the interface between the training loop and a framework, and its implementations in torch and MLX."""
