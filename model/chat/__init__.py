"""Chat: prompts from templates in a sandbox, and parsing of the model's reasoning and tool calls."""
