"""How a generated page writes figures: medians with their spread, tables, commands."""

from collections.abc import Sequence
from typing import Any


def spread(figure: dict[str, Any], form: str) -> str:
    """A median, with the smallest and the largest in brackets."""
    return f"{figure['median']:{form}} ({figure['min']:{form}}–{figure['max']:{form}})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, with a line break at its end."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def command(result: dict[str, Any]) -> str:
    """The command that a result came from."""
    return f"```\n{result['command']}\n```"


def model(result: dict[str, Any]) -> str:
    """Which model a result is of, on what."""
    facts = result["model"]
    size = f"{facts['parameters'] / 1e6:.1f} million parameters"
    threads = ""
    if facts["device"] == "cpu":
        threads = f", {facts['threads']} thread{'' if facts['threads'] == 1 else 's'}"
    return f"Model `{facts['name']}`, {size}, {facts['dtype']} on {facts['device']}{threads}."
