"""From tokens to batches: open the data, pack documents into rows, and read rows in a reproducible order."""
