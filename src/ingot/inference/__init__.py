"""Inference with a trained model: open it from any source, generate, score, and serve batched requests."""
