"""The MLX backend for Apple GPUs, and for CPUs in tests. Weights are named and initialised as by the torch backend."""
