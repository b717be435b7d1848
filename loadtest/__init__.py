"""Load tests and benchmarks.

Modules use the service as a black box over HTTP, unless their name says engine, service, frontend, attention or
training.
"""
