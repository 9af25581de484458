"""The torch backend: building, compiling, replicating, training and saving a model."""
