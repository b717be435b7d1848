"""Wire contract of the public API, OpenAI's and Anthropic's: requests, responses and errors."""
