"""Where documents come from: files of every kind, packed or not, and data sets of the hub."""
