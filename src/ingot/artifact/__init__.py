"""Model files: Ingot's artifact format, the formats of Hugging Face and gpt-simple, and GGUF."""
