"""Tokenize text into a prepared folder: worker processes encode documents, one process writes them in order."""
