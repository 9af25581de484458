"""The `ingot` command, one file per group of commands; heavy imports are inside the command functions."""
