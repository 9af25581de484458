"""The torch backend: how a model is built, placed, compiled, replicated, stepped and saved."""
