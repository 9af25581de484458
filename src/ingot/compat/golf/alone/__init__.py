"""Rooms as the one file `train_gpt.py` has them: the same names as in the package, with only what a golf run asks of them."""
