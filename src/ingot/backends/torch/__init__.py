"""The torch backend: build, compile, replicate, train and save a model."""
