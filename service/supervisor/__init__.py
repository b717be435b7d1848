"""Main process: starts and watches the API process and the worker, and replaces a dead worker."""
