"""`python -m tests.fuzz.guided TARGET FLAGS CORPUS`: fuzz one target with atheris, libFuzzer for Python."""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["model", "service", "uvicorn", "jinja2", "json"]):
    from tests.fuzz.seeds import seeds
    from tests.fuzz.targets import TARGETS


def main() -> None:
    name, *flags = sys.argv[1:]
    corpus = Path(flags[-1])
    for number, data in enumerate(seeds()[name]):
        (corpus / f"seed-{number}").write_bytes(data)
    atheris.Setup([sys.argv[0], *flags], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
