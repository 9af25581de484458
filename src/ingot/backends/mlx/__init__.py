"""The MLX backend: Apple GPUs, and CPUs for tests. Torch initialises and names all weights, so runs can switch backends."""
