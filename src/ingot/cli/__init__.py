"""The `ingot` command: one file per group of commands. Slow imports, such as torch, are inside the command functions."""
