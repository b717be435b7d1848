"""Model families of Hugging Face: the meaning of config.json, and the mapping from checkpoint tensors to Kvasir's.

No file here imports torch. docs/families.md describes how to add a family.
"""
