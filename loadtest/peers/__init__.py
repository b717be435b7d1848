"""Comparison with other inference engines (peers). NAME.txt pins the packages of a peer's Python environment."""
