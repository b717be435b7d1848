"""The playground page: `test_page.py` reads it as a file, `browser_check.py` uses it in a browser, by hand."""
