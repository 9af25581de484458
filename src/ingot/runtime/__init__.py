"""Files, locks, processes, signals, devices and ranks. This package imports nothing from the rest of Ingot except errors.py."""
