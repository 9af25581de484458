"""Documents from text files, compressed or not, and from datasets on the hub."""
