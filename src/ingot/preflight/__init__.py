"""Checks before a run starts: model size, data, duration, memory, and every problem with them."""
