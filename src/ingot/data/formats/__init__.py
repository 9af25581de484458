"""Token formats of other programs: detect, read, write and convert them."""
