"""The page people open first: `index.html`, one static file that needs nothing but this service.

It talks to the public routes (`/v1/completions`, `/v1/models`, `/tokenize`, `/ready`, `/version`) as any client does.
"""
