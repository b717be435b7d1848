"""Formatting of generated pages: medians with their spread, tables and commands."""

from collections.abc import Sequence
from typing import Any


def spread(figure: dict[str, Any], form: str) -> str:
    """Return a median, with the minimum and the maximum in brackets."""
    return f"{figure['median']:{form}} ({figure['min']:{form}}–{figure['max']:{form}})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table that ends in a line break."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def command(result: dict[str, Any]) -> str:
    """Return the command of a result as a code block."""
    return f"```\n{result['command']}\n```"


def model(result: dict[str, Any]) -> str:
    """Return a sentence on the model of a result and its device."""
    facts = result["model"]
    size = f"{facts['parameters'] / 1e6:.1f} million parameters"
    threads = ""
    if facts["device"] == "cpu":
        threads = f", {facts['threads']} thread{'' if facts['threads'] == 1 else 's'}"
    return f"Model `{facts['name']}`, {size}, {facts['dtype']} on {facts['device']}{threads}."
