"""Tokens to logits. Nothing in here knows of precision, compilation or ranks."""
