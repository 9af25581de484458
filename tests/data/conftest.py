"""Here so that the tests of every folder below find toy_tokenizers and hub_server: pytest puts this folder on the path."""
