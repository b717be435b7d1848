"""Web playground: `index.html`, one static file without dependencies.

The page uses only public routes, such as `/v1/completions`, `/v1/chat/completions`, `/tokenize` and `/ready`.
"""
