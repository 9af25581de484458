"""Tokens on disk: shard files, datasets, and the writer of prepared folders."""
