"""Other people's clients, as their registries have them, against a live service: `make test-clients`.

Left out of `make test`: they are some gigabytes, and each has an environment of its own, made by the Makefile.
"""
