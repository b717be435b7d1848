"""Architecture rules of docs/design.md: allowed imports, and sizes of files and functions."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cache
from pathlib import Path

import pytest

from model.system.limits import has_nvidia_driver
from tests.design_map import BEGIN, END, PAGE, design_map, listed_files
from tests.file_checks import for_each_file, name_of, tree

ROOT = Path(__file__).parents[1]
PACKAGES = ("model", "service", "loadtest")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Packages of this repository that each part may import, besides itself.
MAY_IMPORT = {
    "model.training": {"model"},
    "model": set[str](),
    "service.engine": {"model", "service.ipc"},
    "service.ipc": {"model"},
    "service.cli": {"model", "model.training", "service", "service.engine", "service.ipc"},
    "service": {"model", "service.engine", "service.ipc"},
    "loadtest": {"model", "model.training", "service", "service.engine", "service.ipc"},
}
MAX_ENTRIES = 20
# Files of `service` that run in the worker or build it. All other files must work without torch.
ENGINE_SIDE = {
    "service/worker/devices.py",
    "service/worker/fallbacks.py",
    "service/worker/engine_factory.py",
    "service/cli/eval.py",
    "service/cli/generate.py",
    "service/cli/inspect_attention.py",
    "service/cli/inspect_checkpoint.py",
    "service/cli/train.py",
}
# Main also imports the worker's module, so it imports torch inside methods that only the worker process calls.
IMPORTS_LATE = {
    ("service/worker/worker.py", "_build_or_exit"),
    ("service/worker/worker.py", "build"),
    ("service/server.py", "build_server"),  # the API process's imports run while the worker loads the model
    ("service/cli/inspect_attention.py", "main"),  # matplotlib is an extra
    ("loadtest/scenarios/bench_frontend.py", "build"),
    ("loadtest/inprocess/bench_command.py", "main"),
    ("loadtest/measurement/model_shapes.py", "write_random_checkpoint"),
}
TORCH_FREE = (
    "service.server",
    "service.supervisor.api_process",
    "service.cli.main",
    "service.cli.inspect",
    "service.cli.serve",
    "model.huggingface.family_table",
)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def part_of(module: str) -> str:
    """Return the entry of MAY_IMPORT that a module belongs to."""
    return max((part for part in MAY_IMPORT if f"{module}.".startswith(f"{part}.")), key=len, default="")


def imports(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield child.module or ""


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@for_each_file(SOURCES)
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(module_of(path))
    for imported in imports(tree(path)):
        if imported.split(".")[0] in PACKAGES and part_of(imported) != part:
            assert part_of(imported) in MAY_IMPORT[part], f"{name_of(path)} imports {imported}"


def test_imports_between_folders_form_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for path in SOURCES:
        folder = folder_of(path)
        imported = {found for name in imported_modules(path) if (found := folder_of(modules()[name])) != folder}
        graph.setdefault(folder, set()).update(imported)
    assert find_cycle(graph) is None


def test_imports_between_files_form_no_cycle() -> None:
    assert find_cycle({module_of(path): set(imported_modules(path)) for path in SOURCES}) is None


def test_the_cycle_search_finds_a_cycle() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def folder_of(path: Path) -> str:
    return str(path.parent.relative_to(ROOT))


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the repository's modules that a file imports, where `from package import module` imports the module."""
    for node in ast.walk(tree(path)):
        names = list(imports(node)) if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names] + names
        found = [name for name in names if name in modules() and modules()[name] != path]
        yield from found[:1] if isinstance(node, ast.ImportFrom) and len(node.names) == 1 else found


def find_cycle(graph: Mapping[str, Set[str]]) -> list[str] | None:
    """Return the nodes of one cycle, with the first node again at its end; None without a cycle."""
    done: set[str] = set()

    def visit(node: str, path: tuple[str, ...]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            for following in sorted(graph[node]):
                if (cycle := visit(following, (*path, node))) is not None:
                    return cycle
            done.add(node)
        return None

    return next((cycle for node in sorted(graph) if (cycle := visit(node, ())) is not None), None)


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_have_few_entries(package: str) -> None:
    contents: dict[Path, set[str]] = {}
    for path in listed_files(package):
        for depth in range(1, len(path.parts)):
            contents.setdefault(Path(*path.parts[:depth]), set()).add(path.parts[depth])
    assert {str(folder): len(names) for folder, names in contents.items() if len(names) > MAX_ENTRIES} == {}


@cache
def modules() -> dict[str, Path]:
    return {module_of(path): path for path in SOURCES}


@for_each_file(SOURCES)
def test_no_import_inside_a_function(path: Path) -> None:
    for function in functions(path):
        if (name_of(path), function.name) not in IMPORTS_LATE:
            assert list(imports(function)) == [], f"{name_of(path)}:{function.lineno}"


@for_each_file(SOURCES)
def test_no_global_statement_and_no_catch_all_module(path: Path) -> None:
    assert not [node for node in ast.walk(tree(path)) if isinstance(node, ast.Global)]
    assert path.stem not in {"utils", "util", "common", "helpers", "base", "misc"}


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether Triton compiles the function."""
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


@for_each_file(SOURCES)
def test_sizes(path: Path) -> None:
    """Files have at most 600 lines; functions have at most 60 lines and 8 parameters."""
    assert len(path.read_text().splitlines()) <= 600
    for function in functions(path):
        assert function.end_lineno is not None
        assert function.end_lineno - function.lineno < 60, f"{function.name} is too long"
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        names = [argument.arg for argument in (*positional, *arguments.kwonlyargs)]
        # exempt: LitServe's signature, and kernels, whose parameters are what a launch passes
        if part_of(module_of(path)) and function.name != "__call__" and not is_kernel(function):
            assert len([name for name in names if name not in ("self", "cls")]) <= 8, f"{function.name}: {names}"


@for_each_file([path for path in SOURCES if path.name == "__init__.py"])
def test_package_init_files_hold_a_docstring_alone(path: Path) -> None:
    (node,) = tree(path).body
    assert isinstance(node, ast.Expr)
    assert ast.get_docstring(tree(path))


@for_each_file([path for path in SOURCES if path.name != "__init__.py"])
def test_public_names_have_docstrings(path: Path) -> None:
    assert ast.get_docstring(tree(path)), "the module has no docstring"
    for node in tree(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            # The docstring of the module may document an error instead.
            assert ast.get_docstring(node) or node.name in (ast.get_docstring(tree(path)) or ""), node.name


def test_class_names_are_unique() -> None:
    """A public class name is unique in the whole repository."""
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name_of(path))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


# Logs of experiments name files that have been moved or removed since.
LOGS = ("decisions.md", "performance-log.md", "training-log.md")


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in PAGE.parent.glob("*.md"))]
)
def test_pages_name_files_that_exist(page: str) -> None:
    text = (ROOT / page).read_text() if page.removeprefix("docs/") not in LOGS else ""
    named = re.findall(r"`((?:service|model|loadtest|tests|monitoring)/[\w/.-]+)", text)
    programs = re.findall(r"python -m ((?:service|model|loadtest|tests|monitoring)[\w.]+)", text)
    files = [name.rstrip(".") for name in named if "NAME" not in name]
    modules_named = [program.rstrip(".").replace(".", "/") for program in programs]
    assert [name for name in files if not (ROOT / name).exists()] == []
    assert [
        name
        for name in modules_named
        if not (ROOT / f"{name}.py").exists() and not (ROOT / name / "__main__.py").exists()
    ] == []


def test_the_design_page_maps_every_file() -> None:
    text = PAGE.read_text()
    written = text.partition(BEGIN)[2].partition(END)[0]
    assert written == design_map(), "run python -m tests.design_map"


def first_with(module: str, imported: Sequence[str]) -> str:
    """Import modules in a new process. Return the first one with which `module` is imported too; "" without one."""
    code = "import importlib, sys\nfor name in sys.argv[2:]:\n    importlib.import_module(name)\n"
    code += "    if sys.argv[1] in sys.modules:\n        sys.exit(name)"
    words = [sys.executable, "-W", "ignore", "-c", code, module, *imported]
    return subprocess.run(words, cwd=ROOT, check=False, stderr=subprocess.PIPE, text=True).stderr.strip()


def test_the_api_process_imports_no_torch() -> None:
    """Importing torch takes 2 s and over 200 MiB, which processes forked from main must not inherit."""
    assert first_with("torch", TORCH_FREE) == ""


def test_a_worker_imports_no_compiler_of_pytorch() -> None:
    """Import of torch._dynamo would double the import time of a worker and take 70 MB. torch._decomp takes a fifth."""
    unused = {"torch._dynamo"} if has_nvidia_driver() else {"torch._dynamo", "torch._decomp"}
    code = (
        "import sys; from service.worker import worker; worker.import_engine(); "
        f"sys.exit('service.worker.engine_factory' not in sys.modules or not {unused}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=False).returncode == 0


def test_only_the_worker_side_imports_torch() -> None:
    for path in SOURCES:
        name = name_of(path)
        if name.startswith("service/") and not name.startswith("service/engine/") and name not in ENGINE_SIDE:
            late = {function.name for function in functions(path) if (name, function.name) in IMPORTS_LATE}
            direct = [i for i in imports(tree(path)) if i.split(".")[0] == "torch"]
            assert not direct or late, f"{name} imports torch"


def test_settings_are_the_only_reader_of_the_environment() -> None:
    readers = [
        name_of(path)
        for path in SOURCES
        if name_of(path).startswith(("service/", "model/"))
        and any(isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv") for n in ast.walk(tree(path)))
    ]
    # prometheus_client and OpenMP read their settings from the environment when they are loaded, so these files
    # set it there. XDG_CACHE_HOME places compiled kernels, for
    # services, benchmarks and tests. The health check runs every few seconds, and importing the settings would
    # take 0.4 s of CPU time.
    assert set(readers) <= {
        *("service/config/settings.py", "service/metrics/recorder.py", "service/config/torch_environment.py"),
        *("service/cli/healthcheck.py", "model/kernels/build.py"),
    }


@for_each_file(TESTS)
def test_tests_do_not_sleep_skip_or_expect_failure(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("skip", "skipif", "xfail", "importorskip"), f"{name_of(path)}:{node.lineno}"
