"""Settings of a run: the schema, the recipes, and the code that loads and formats configs."""
