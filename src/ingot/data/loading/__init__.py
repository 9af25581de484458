"""From tokens to batches: row order, document packing and prefetching."""
