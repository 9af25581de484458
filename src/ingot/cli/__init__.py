"""The `ingot` command, one file per verb: each adds itself to the app of verbs.py and imports heavy things when it is called."""
