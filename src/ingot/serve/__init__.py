"""A trained model behind OpenAI's completions, for any client that speaks them."""
