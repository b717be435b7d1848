"""Main process: starts, watches and replaces the worker."""
