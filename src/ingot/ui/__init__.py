"""The live page: shows runs in a browser on this machine."""
