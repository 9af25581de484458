"""Check a run before it starts: its model size, data, duration and memory, with a list of all problems found."""
