"""A live page on runs: reads their folders as they lie, and shows them in a browser of this machine."""
