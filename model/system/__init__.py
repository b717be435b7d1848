"""The machine below the model, torch-free.

limits  CPUs and memory that this process may use: affinity, control groups, free memory
"""
