"""Inference engine: plans each step, computes it and appends the sampled tokens. It knows nothing of HTTP."""
