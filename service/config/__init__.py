"""Settings: flags, environment variables, defaults and their errors."""
