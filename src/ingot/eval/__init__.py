"""Model evaluation: bits per byte, benchmark tasks, and checks that the scores are valid."""
