"""The machine: files, locks, processes, signals, devices and ranks. Imports nothing of the package but errors."""
