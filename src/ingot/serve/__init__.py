"""An OpenAI-compatible completions server for a trained model."""
