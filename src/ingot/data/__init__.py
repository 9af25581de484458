"""Turn text into batches: text -> documents -> tokens -> shards -> batches.

This file imports nothing, so that a command imports only the modules it needs.
"""

SPLITS = ("train", "val")
SHARD_TOKENS = 100_000_000  # default number of tokens in a shard file
