"""Compatibility with the commands, files and logs of nanoGPT, gpt-simple and the scripts of the golf challenge."""
