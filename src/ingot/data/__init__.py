"""Text -> documents -> tokens -> shards -> batches.

Nothing is imported here, so that a command that needs one of these modules pays for that one alone.
"""

SPLITS = ("train", "val")
SHARD_TOKENS = 100_000_000  # in one file, unless somebody says otherwise
