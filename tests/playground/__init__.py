"""Tests of the playground page: `test_page.py` reads the file; `browser_check.py`, run by hand, needs a browser."""
