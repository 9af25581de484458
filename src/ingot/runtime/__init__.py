"""The machine: files, locks, processes, signals, devices and ranks. Imports nothing from the package except errors."""
