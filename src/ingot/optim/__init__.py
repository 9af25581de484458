"""Gradients to updates."""
