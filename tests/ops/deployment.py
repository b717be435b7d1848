"""Deployment files, parsed as Docker and Compose parse them."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]


def read_yaml(path: str) -> Any:
    """Load a YAML file of the repository, with anchors and merges resolved."""
    return yaml.safe_load((ROOT / path).read_text())


def compose_variables() -> dict[str, str | None]:
    """Return the variables that docker-compose.yml reads, with their defaults."""
    found = re.findall(r"\$\{(\w+)(?::-([^}]*))?\}", (ROOT / "docker-compose.yml").read_text())
    return {name: default or None for name, default in found}


def with_defaults(value: str) -> str:
    """Replace the variables in `value` by their defaults, as Compose does in an empty environment."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def seconds(duration: str) -> float:
    """Parse a Compose duration of whole seconds."""
    match = re.fullmatch(r"(\d+)s", duration)
    assert match, duration
    return float(match[1])


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a Dockerfile, with its lines joined, and its build stage."""

    stage: str
    name: str
    value: str

    def exec_form(self) -> list[str]:
        """Parse a JSON array of words."""
        words = json.loads(self.value[self.value.index("[") :])
        assert isinstance(words, list)
        return words

    def pairs(self) -> dict[str, str]:
        """Parse the assignments of an ENV or ARG."""
        return dict(word.split("=", 1) for word in shlex.split(self.value))


def dockerfile() -> list[Instruction]:
    """Return the instructions of the Dockerfile in order. Instructions before the first stage have stage ''."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    stage, instructions = "", []
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        name, _, value = line.strip().partition(" ")
        if name == "FROM":
            stage = value.rpartition(" AS ")[2]
        instructions.append(Instruction(stage, name, " ".join(value.split())))
    return instructions
