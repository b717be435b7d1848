"""Structured output in the API process: what a request asks for, and whether it can be followed.

formats  the wire contract: `response_format` and `structured_outputs`, and what of them a completion has to follow
check    the child process that compiles a stranger's grammar within bounds
checker  whoever asks it, one request at a time, and remembers
"""
