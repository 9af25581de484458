"""Model files: our artifact format, the formats of Hugging Face and gpt-simple, and GGUF."""
