"""What knows the challenge's data: its repository, its names, its manifest and its scripts."""
