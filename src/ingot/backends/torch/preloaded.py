"""Importing this module preloads what GPU runs need: a forkserver takes modules to import, not functions to call."""

from ingot.backends.torch.startup import preload

preload()
