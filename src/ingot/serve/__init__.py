"""A server of OpenAI's completions API for a trained model."""
