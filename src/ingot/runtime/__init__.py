"""Files, locks, processes, signals, devices and ranks. Imports nothing else from the package except errors."""
