"""Tokens on disk: shard files, datasets, and writing a prepared folder."""
