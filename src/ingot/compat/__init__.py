"""Other programs' commands, files and logs, translated to one Config: nanoGPT, gpt-simple and the golf challenge."""
