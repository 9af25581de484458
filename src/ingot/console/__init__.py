"""Shared by all command lines: errors and exit codes, progress, tables, charts and the launcher of ranks."""
