"""Code shared by all command lines: errors and exit codes, progress, tables, charts and the rank launcher."""
