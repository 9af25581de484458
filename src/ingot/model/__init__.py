"""Models: tokens in, logits out. A model knows nothing about the precision, compilation or ranks of a run."""
