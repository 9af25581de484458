"""Check a run before it starts (model size, data, duration, memory), and list all problems found."""
