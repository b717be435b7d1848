"""Formats in which models write tool calls, and their table."""
