"""A trained model: its weights from wherever they lie, and the one way to open them."""
