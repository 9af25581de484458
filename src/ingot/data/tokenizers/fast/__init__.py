"""Words encoded once: a table of what a tokenizer makes of them, and the proof of where words begin."""
