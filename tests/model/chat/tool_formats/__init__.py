"""Tool formats: grammar, parser, and chat templates of published models."""
