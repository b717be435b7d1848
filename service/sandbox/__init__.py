"""Child processes and threads with limits, for untrusted input."""
