"""The `ingot` command, one file per group of commands; heavy imports stay inside the commands."""
