"""Structured output in the API process: what a request asks for, and whether it can be followed.

formats  the wire contract: `response_format` and `structured_outputs`, and what of them a completion has to follow
schemas  a schema made ready for the library: numbers that stay exact, keys that count, nothing of the library's own
lark     a grammar made ready for it: text alone, no tokens by name or number
check    the child process that compiles a stranger's grammar within bounds
checker  whoever asks it, one request at a time, and remembers
"""
