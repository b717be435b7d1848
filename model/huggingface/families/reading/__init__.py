"""Definition of a model family, and readers of config.json keys that several families have."""
