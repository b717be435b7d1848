"""Worker process: the engine loop and its start."""
