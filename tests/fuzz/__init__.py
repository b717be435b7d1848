"""Anything at all, for what reads bytes of strangers.

targets   what must hold of any bytes; one function a reader
seeds     valid inputs, from which others are made
__main__  `make fuzz`: each target for a stated time
guided    one target, guided by the code that inputs reach (atheris)
test_short  a few hundred inputs each, the same in every run
"""
