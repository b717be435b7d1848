"""Inference engine: schedule, execute, commit. Single-threaded, without any knowledge of HTTP."""
