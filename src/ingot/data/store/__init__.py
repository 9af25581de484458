"""Tokens on the disk: shards, the data set they form, and the folder while it is written."""
