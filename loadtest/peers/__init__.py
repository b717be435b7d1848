"""Comparison with other engines. A driver runs in the environment of a peer, whose packages NAME.txt pins."""
