"""The experiment bench of the frontier: a model whose every candidate is a setting, its optimizer, its data order, its score."""
