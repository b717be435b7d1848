"""Tests of `service.engine`: state machines, naive text processing, and parity with `generate`."""
