"""MLX: Apple's GPUs, CPUs for tests. Weights are drawn by torch and every record has torch's names, so that a run can move."""
