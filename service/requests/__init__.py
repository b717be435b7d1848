"""Requests between admission and response: submission to the worker, resubmission after its death, response buffers."""
