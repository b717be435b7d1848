"""Drivers of the engines that `loadtest.bench_peers` compares.

A driver runs in the peer's environment, holds a model, and speaks `loadtest.peers.protocol` on standard input and
output. NAME.txt pins the packages of that environment.
"""
