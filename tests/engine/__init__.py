"""Tests of the engine: state machines, parity with the reference implementation, and batch invariance."""
