"""Recorded traffic: formats of traces, and the requests that repeat one."""
