"""Tests of `service.engine`: bookkeeping as state machines, text against naive twins, tokens against `generate`."""
