"""Fuzz tests of all code that parses bytes from clients or files of other origin.

targets     one function per parser, which raises if a property does not hold for its input
seeds       valid inputs of each target, from which the fuzzers derive other inputs
__main__    `make fuzz`: each target for a given time
guided      one target, guided by code coverage (atheris)
test_short  a few hundred inputs per target, the same in every test run
"""
