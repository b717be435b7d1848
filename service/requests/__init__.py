"""Requests between admission and response: submission to the engine, replay, response buffers."""
