"""Generation with torch: a key-value cache, sampling, batches of prompts."""
