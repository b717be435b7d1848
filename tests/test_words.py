"""Word rules of docs/design.md that a program can check."""

import ast
import io
import re
import tokenize
from pathlib import Path

from tests.design_map import ROOT, source_files
from tests.file_checks import for_each_file, name_of, tree

SOURCES = source_files()
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# First words of docstrings that describe a question instead of a thing or an action.
OPENING = re.compile(r"(What|Who|Whom|How|Whose|Whether|Where|Which|When|Why)\b")
# Words for people. Messages and comments name the process, request, thread or client.
PEOPLE = re.compile(r"\b(who|whom|whoever|nobody|everybody|somebody|anybody)\b", re.IGNORECASE)
PHRASES = re.compile(r"\b(of late|of our own|told|(?<!there )is none|so many|in any company)\b")

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# Texts about people: prompts, stories, questions, and the words of a trained model.
DATA = {"model/training/data/make_conversations.py", "model/chat/chatml.py", "model/evaluation/prompts.py"}


def prose(page: str) -> str:
    """Return a page's text without its code: blocks and spans of code quote programs and a model's output."""
    return re.sub(r"`[^`\\n]*`", "", re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE))


def words_of(path: Path) -> list[str]:
    """Return a Python file's docstrings, comments and function names: its text without strings, which may be data."""
    source = path.read_text()
    nodes = list(ast.walk(tree(path)))
    documented = [node for node in nodes if isinstance(node, DOCUMENTED)]
    comments = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    names = [node.name.replace("_", " ") for node in documented if not isinstance(node, ast.Module)]
    return [*((ast.get_docstring(node) or "") for node in documented), *comments, *names]


@for_each_file([*(path for path in SOURCES if path.suffix == ".py"), *TESTS])
def test_docstrings_open_with_an_imperative_or_a_noun(path: Path) -> None:
    nodes = [node for node in ast.walk(tree(path)) if isinstance(node, DOCUMENTED)]
    openings = [(ast.get_docstring(node) or "").splitlines()[:1] for node in nodes]
    assert [line for lines in openings for line in lines if OPENING.match(line)] == []


@for_each_file([path for path in SOURCES if name_of(path) not in DATA])
def test_sources_name_no_people(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert [line for line in lines if PEOPLE.search(line)] == []


@for_each_file([path for path in SOURCES if name_of(path) not in DATA])
def test_sources_have_no_private_phrases(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert [line for line in lines if PHRASES.search(line)] == []


@for_each_file(PAGES)
def test_pages_have_no_private_phrases(path: Path) -> None:
    lines = prose(path.read_text()).splitlines()
    assert [line for line in lines if PHRASES.search(line)] == []


@for_each_file(TESTS)
def test_tests_name_no_people_and_have_no_private_phrases(path: Path) -> None:
    source = path.read_text().replace("_", " ")
    if not (PEOPLE.search(source) or PHRASES.search(source)):
        return  # most files: finding the comments of all files would take seconds
    assert [text for text in words_of(path) if PEOPLE.search(text) or PHRASES.search(text)] == []
