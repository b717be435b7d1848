"""Fixtures for all tests."""

import gc
import logging
import signal
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from model.huggingface.families.table import PROOFS_FILE
from model.io.files import read_json, write_json
from model.kernels.build import CACHE, BuildError
from model.kernels.kernel_library import load_kernels
from model.system.limits import usable_cpus
from tests.families.parity_table import outcomes, table, updated
from tests.tiny_model import save_tiny_checkpoint

ROOT = Path(__file__).parent
# Test files that take ten seconds or more, the slowest first, so that parallel runs finish at about the same time.
LONGEST = (
    "gpu/test_compiled_kernels.py",
    "loadtest/test_scenarios.py",
    "test_readme.py",
    "service/cli/test_train_own_text.py",
    "hostile/test_machines.py",
    "faults/test_faults.py",
    "e2e/test_wire.py",
    "e2e/test_lifecycle.py",
    "e2e/test_worker_death.py",
    "families/test_parity.py",
    "families/test_quantized.py",
    "families/test_memory.py",
    "families/test_serving.py",
    "hostile/test_bodies.py",
    "hostile/test_clients.py",
    "hostile/test_http.py",
    "service/cli/test_train_command.py",
    "service/cli/test_main.py",
    "model/training/test_proof.py",
    "model/training/test_mechanisms.py",
    "engine/test_parity.py",
    "model/chat/test_sandbox_escapes.py",
    "model/attention/test_native_cache_dtype.py",
    "service/cli/test_batch.py",
    "e2e/test_lm_eval.py",
    "e2e/test_devices.py",
    "e2e/test_crowd.py",
    "e2e/test_tools.py",
    "e2e/test_request_log.py",
    "e2e/test_thinking.py",
    "e2e/test_chat.py",
    "e2e/test_hang.py",
    "e2e/test_poison.py",
    "model/training/test_train.py",
    "model/tokenizer/test_export.py",
    "model/tokenizer/test_agreement.py",
    "e2e/test_completions.py",
    "e2e/test_structured.py",
)

# Reproducible examples without deadlines, since Hypothesis measures deadlines by wall-clock time.
settings.register_profile("any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make families`."""
    parser.addoption("--families", action="store_true", help="serve every family, and write the date of its proof")


def pytest_configure(config: pytest.Config) -> None:
    """Limit torch to one thread per parallel test worker: threads that share a core wait for each other."""
    gc.disable()  # until all files are collected: garbage collections took a quarter of the time of their imports
    # A background job of a shell ignores SIGINT, and so would all processes that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)
    # Compile the kernels once per machine, before the servers of tests would compile them in parallel.
    with suppress(BuildError):
        load_kernels(CACHE)


def pytest_xdist_auto_num_workers() -> int:
    """Return one process more than CPUs: the tests of servers spend a sixth of their time waiting."""
    return usable_cpus() + 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order test files by duration. Deselect tests marked `gpu`, `triton` or `families` without what they need."""
    places = {ROOT / name: place for place, name in enumerate(LONGEST)}
    assert all(path.is_file() for path in places), "LONGEST names a file that is not there"
    items.sort(key=lambda item: places.get(item.path, len(places)))
    wanted = {
        "gpu": torch.cuda.is_available(),
        "triton": find_spec("triton") is not None,
        "families": config.getoption("--families"),
    }
    left_out = [mark for mark, is_wanted in wanted.items() if not is_wanted]
    needing = [item for item in items if any(item.get_closest_marker(mark) for mark in left_out)]
    if needing:
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]


def pytest_collection_finish() -> None:
    """Collect garbage again, but do not look through what the imports left."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the parity of every family if its tests ran. With --families, write the proofs."""
    reports = [
        (report.user_properties, passed)
        for outcome, passed in (("passed", True), ("failed", False), ("error", False))
        for report in terminalreporter.stats.get(outcome, [])
    ]
    if find_spec("triton") is None:
        terminalreporter.line("triton is not installed: the GPU kernels were not compiled")
    if found := outcomes(reports):
        terminalreporter.section("parity of every family with transformers")
        for line in table(found):
            terminalreporter.line(line)
        if config.getoption("--families"):
            write_json(PROOFS_FILE, updated(read_json(PROOFS_FILE), found))


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Restore logging, which commands that run in this process reconfigure."""
    yield
    for name in ("service", "model"):
        ours = logging.getLogger(name)
        ours.handlers.clear()
        ours.setLevel(logging.NOTSET)
        ours.propagate = True


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a complete checkpoint directory with random weights. Read only: copy it to damage it."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")
