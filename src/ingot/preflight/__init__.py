"""Checks before a run starts: its size, data, duration, memory, and everything that is wrong with them."""
