"""The live page: shows run folders in a browser on this machine."""
