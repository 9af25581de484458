"""The `ingot` command, one file per verb: each adds itself with `register(app)` and imports heavy things when it is called."""
