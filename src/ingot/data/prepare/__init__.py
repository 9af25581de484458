"""Text to a prepared folder: documents are encoded by processes and written in order."""
