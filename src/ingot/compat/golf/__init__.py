"""The golf door: one script driven by environment variables, and its submission."""
