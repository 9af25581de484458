"""Text -> documents -> tokens -> shards -> batches.

Nothing is imported here, so that a command imports only the modules it needs.
"""

SPLITS = ("train", "val")
SHARD_TOKENS = 100_000_000  # default number of tokens in a shard file
