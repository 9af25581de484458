"""Models: tokens in, logits out. Nothing in this package depends on precision, compilation or ranks."""
