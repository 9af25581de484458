"""Model files: our artifact format, and export to Hugging Face, GGUF and gpt-simple."""
