"""The deployment's files, read the way Docker and Compose read them."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]


def read_yaml(path: str) -> Any:
    """A YAML file of the repository; anchors and merges resolved."""
    return yaml.safe_load((ROOT / path).read_text())


def compose_variables() -> dict[str, str | None]:
    """The variables that docker-compose.yml reads, and their defaults."""
    found = re.findall(r"\$\{(\w+)(?::-([^}]*))?\}", (ROOT / "docker-compose.yml").read_text())
    return {name: default or None for name, default in found}


def with_defaults(value: str) -> str:
    """`value` as Compose reads it in an empty environment."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def seconds(duration: str) -> float:
    """A Compose duration of whole seconds."""
    match = re.fullmatch(r"(\d+)s", duration)
    assert match, duration
    return float(match[1])


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a Dockerfile, its lines joined, and the build stage it is in."""

    stage: str
    name: str
    value: str

    def exec_form(self) -> list[str]:
        """The words of a JSON array."""
        words = json.loads(self.value[self.value.index("[") :])
        assert isinstance(words, list)
        return words

    def pairs(self) -> dict[str, str]:
        """The assignments of an ENV or ARG."""
        return dict(word.split("=", 1) for word in shlex.split(self.value))


def dockerfile() -> list[Instruction]:
    """The instructions of the Dockerfile in order. What stands before the first stage is in stage ''."""
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
