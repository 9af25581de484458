"""What is known of a run before it starts: its size, its data, how long it lasts, and what is wrong with any of it."""
