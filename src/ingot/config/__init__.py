"""Settings of a run: the schema, the recipes, how they are loaded and how they are shown."""
