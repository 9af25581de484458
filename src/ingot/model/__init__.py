"""Models: tokens to logits. Nothing in this package depends on precision, compilation or ranks."""
