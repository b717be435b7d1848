"""Chat templates and their sandbox."""
