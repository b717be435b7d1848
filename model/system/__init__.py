"""System information, torch-free."""
