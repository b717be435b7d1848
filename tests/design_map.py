"""Map of the source files in docs/map.md, generated from each file's first line.

`python -m tests.design_map` rewrites the map; `tests/test_architecture.py` compares it.
"""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "map.md"
BEGIN, END = "<!-- map: python -m tests.design_map -->\n", "<!-- end of map -->\n"
PACKAGES = ("model", "service", "loadtest", "monitoring")


def design_map() -> str:
    """Return one Markdown table per folder of `PACKAGES`, with one row per source file."""
    folders: dict[Path, list[Path]] = {}
    for path in source_files():
        folders.setdefault(path.parent, []).append(path)
    return "\n".join(_table(folder, folders[folder]) for folder in sorted(folders))


def source_files() -> list[Path]:
    """Return the Python and C++ files of `PACKAGES`."""
    return sorted(ROOT / path for path in listed_files(*PACKAGES) if path.suffix in (".py", ".cpp", ".h"))


def listed_files(*folders: str) -> list[Path]:
    """Return the files in these folders that git tracks, or would track once added, relative to `ROOT`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return sorted({Path(name) for name in listed.stdout.splitlines() if (ROOT / name).is_file()})


def summary(path: Path) -> str:
    """Return the first sentence of a Python module's docstring, or of a C++ file's opening comment, on one line."""
    text = path.read_text()
    if path.suffix == ".py":
        paragraph = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    else:
        lines = text.splitlines()
        end = next(i for i, line in enumerate(lines) if not line.startswith("//") or line == "//")
        paragraph = " ".join(line.removeprefix("//").strip() for line in lines[:end])
    return re.split(r"(?<! al)\. ", " ".join(paragraph.split()))[0].removesuffix(".")


def _table(folder: Path, paths: list[Path]) -> str:
    package = next((path for path in paths if path.name == "__init__.py"), None)
    head = f"**`{folder.relative_to(ROOT)}/`**" + (f": {summary(package)}" if package and summary(package) else "")
    rows = "".join(
        f"| `{path.name}` | {summary(path).replace('|', chr(92) + '|')} |\n" for path in paths if path != package
    )
    return f"{head}\n\n| file | content |\n|---|---|\n{rows}" if rows else f"{head}\n"


def main() -> None:
    """Rewrite the map in docs/map.md."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + design_map() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
