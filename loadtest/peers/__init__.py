"""Comparison with other engines: installation, processes, drivers and measured cells.

A driver (`loadtest.peers.drivers`) runs in the peer's environment, holds a model, and speaks
`loadtest.peers.drivers.protocol` on standard input and output. NAME.txt pins the packages of that environment.
"""
