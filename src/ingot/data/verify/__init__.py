"""What can be wrong with data, and what it holds."""
