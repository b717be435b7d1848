"""Tests of rules for source files: one test for all files, which names every file that breaks the rule."""

import ast
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.design_map import ROOT


def name_of(path: Path) -> str:
    """Return a file's path in the repository."""
    return str(path.relative_to(ROOT))


@cache
def tree(path: Path) -> ast.Module:
    """Return a Python file, parsed once for all rules."""
    return ast.parse(path.read_text(), str(path))


def for_each_file(paths: Sequence[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Return a decorator that makes a test of all files from a check of one file.

    A parametrized test for each file would take longer to collect and report than to run.
    """

    def decorate(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            failures: list[str] = []
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    failures.append(f"{name_of(path)}: {error}")
            if failures:
                pytest.fail("\n".join(failures), pytrace=False)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate
