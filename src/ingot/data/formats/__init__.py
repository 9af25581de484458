"""Token data of other programs: how each format is recognised, read, written and converted."""
