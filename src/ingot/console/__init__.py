"""Shared by the command lines: errors and exit codes, progress lines, tables, charts and starting ranks."""
