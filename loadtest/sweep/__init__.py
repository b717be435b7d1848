"""Command `kvasir loadtest`: find the limit of any server with OpenAI's API, and report it."""
