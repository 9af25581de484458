"""Compatibility with other programs' commands, files and logs: nanoGPT, gpt-simple and the golf challenge."""
