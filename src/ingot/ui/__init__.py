"""The live page, which shows runs in a browser on this machine."""
