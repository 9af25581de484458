"""A trained model: open it from anywhere, generate, score, serve batches."""
