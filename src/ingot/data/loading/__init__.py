"""Tokens to batches: the order of rows, packing, reading ahead."""
