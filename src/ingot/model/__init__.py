"""Models: tokens in, logits out. A model does not know about the precision, compilation and ranks of a run."""
