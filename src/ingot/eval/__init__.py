"""Scores of a model: bits per byte, tasks, and checks that the scores are valid."""
