"""The torch backend: build, place, compile, replicate, train and save a model."""
