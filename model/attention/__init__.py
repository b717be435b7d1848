"""Attention backends, one file each. `interface` holds the contract and the table of backends."""
