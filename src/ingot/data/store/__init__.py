"""Tokens on the disk: shards, the dataset they form, and the folder while it is written."""
