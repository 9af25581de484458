"""Run folders: writing, locking, reading and reporting runs."""
