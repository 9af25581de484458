"""The MLX backend for Apple GPUs, and for CPUs in tests. Weight names and initial values match the torch backend's."""
