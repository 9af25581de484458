"""What every room may ask of the machine: its devices, their precision, and which rank this process is."""
