"""Adapters in one batch: each request equals its merged model, and does not depend on the rest of the batch."""

import random
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from model.checkpoint.lora_adapter import read_adapter
from model.checkpoint.manifest import read_manifest
from model.nn.linear import replace_linears
from tests.families.models import Case, load
from tests.lora.adapter_files import merge, write_adapter
from tests.lora.engines import AdaptedEngine, difference
from tests.model.kernel_libraries import BUILDABLE

NUM_ADAPTERS, NUM_STREAMS = 8, 64
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = "native" if BUILDABLE else "sdpa"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the directories of a base model ("") and of adapters with different ranks and targets, by name."""
    root = tmp_path_factory.mktemp("lora")
    Case("qwen3", {"num_key_value_heads": 2}).build().save_pretrained(root / "base")
    found = {"": root / "base"}
    for number in range(NUM_ADAPTERS):
        targets = TARGETS if number % 2 else TARGETS[number % 3 :: 3]
        found[f"a{number}"] = write_adapter(
            root / f"a{number}", root / "base", targets, seed=number, rank=1 + 5 * number
        )
    return found


def streams(engine: AdaptedEngine) -> dict[str, tuple[str, list[int]]]:
    """Return the adapter and the prompt of each stream. A ninth of the streams have the base model."""
    rng = random.Random(5)
    shared = [rng.randrange(250) for _ in range(16)]
    names = sorted(engine.keys)
    return {
        f"s{number}": (
            names[number % len(names)],
            (shared if number % 4 == 0 else []) + [rng.randrange(250) for _ in range(rng.randint(1, 20))],
        )
        for number in range(NUM_STREAMS)
    }


def run_together(engine: AdaptedEngine) -> dict[str, list[tuple[int, float]]]:
    asked = streams(engine).items()
    found = engine.run(*(engine.submit_of(uid, name, ids, max_tokens=12) for uid, (name, ids) in asked))
    assert engine.largest_batch == NUM_STREAMS
    return found


def test_eight_adapters_over_64_streams_equal_their_merged_models(directories: dict[str, Path], tmp_path: Path) -> None:
    base = directories[""]
    adapters = {name: directory for name, directory in directories.items() if name}
    engine = AdaptedEngine(load(base, ATTENTION), base, adapters)
    found = run_together(engine)
    for name, directory in directories.items():
        merged = merge(base, directory, tmp_path / name) if name else base
        alone = AdaptedEngine(load(merged, ATTENTION), merged, {})
        own = {uid: ids for uid, (adapter, ids) in streams(engine).items() if adapter == name}
        assert len(own) >= 7
        expected = alone.run(*(alone.submit_of(uid, "", ids, max_tokens=12) for uid, ids in own.items()))
        for uid, entries in expected.items():
            assert difference(found[uid], entries) <= 1e-5, (name, uid)


@pytest.mark.parametrize("numbers", ["float32", "bfloat16", "int8", "int4"] if BUILDABLE else [])
def test_a_request_is_identical_alone_and_beside_other_adapters(directories: dict[str, Path], numbers: str) -> None:
    def make(**config: Any) -> AdaptedEngine:
        model = load(directories[""], "native")
        if numbers.startswith("int"):
            replace_linears(model, numbers)
        elif numbers == "bfloat16":
            model = model.bfloat16()
        adapters = {name: directory for name, directory in directories.items() if name}
        return AdaptedEngine(model, directories[""], adapters, **config)

    together = run_together(make())
    in_chunks = make(max_batched_tokens=64, num_blocks=120)
    assert (
        in_chunks.run(
            *(in_chunks.submit_of(uid, name, ids, max_tokens=12) for uid, (name, ids) in streams(in_chunks).items())
        )
        == together
    )
    alone = make(enable_prefix_cache=False)
    for uid, (name, ids) in list(streams(alone).items())[:18]:
        assert alone.run(alone.submit_of(uid, name, ids, max_tokens=12)) == {uid: together[uid]}


def test_prefixes_are_found_only_by_requests_of_the_same_adapter(directories: dict[str, Path]) -> None:
    base, ids = directories[""], list(range(50))
    engine = AdaptedEngine(load(base, ATTENTION), base, {name: directories[name] for name in ("a1", "a3")})
    for number, (name, num_cached) in enumerate({"": 0, "a1": 0, "a3": 0}.items()):
        engine.run(engine.submit_of(f"{number}", name, ids, prompt_logprobs=None))
        assert engine.num_cached[f"{number}"] == num_cached
        engine.run(engine.submit_of(f"again {number}", name, ids, prompt_logprobs=None))
        assert engine.num_cached[f"again {number}"] == 48


def test_an_adapter_whose_files_have_changed_ends_its_requests_and_no_others(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    base = directories[""]
    directory = write_adapter(tmp_path / "changed", base, TARGETS, seed=1)
    engine = AdaptedEngine(load(base, ATTENTION), base, {})
    engine.keys["changed"] = read_adapter(directory, read_manifest(base)).key
    write_adapter(directory, base, TARGETS, seed=2)
    engine.load_key(engine.keys["changed"], directory)
    plain, failing = engine.submit_of("plain", "", [1, 2]), engine.submit_of("failing", "changed", [1, 2])
    with pytest.raises(AssertionError, match="missing or have changed"):
        engine.run(failing)
    assert len(engine.run(plain)["plain"]) == 8
    write_adapter(directory, base, TARGETS, seed=1)  # the files are back
    assert len(engine.run(engine.submit_of("again", "changed", [1, 2]))["again"]) == 8


def test_steps_go_on_while_an_adapter_is_loaded(directories: dict[str, Path]) -> None:
    base, may_read = directories[""], threading.Event()
    engine = AdaptedEngine(load(base, ATTENTION), base, {}, read_when=may_read)
    engine.begin_load("a1", directories["a1"])
    held, cancelled = (engine.submit_of(uid, "a1", [1, 2]) for uid in ("held", "cancelled"))
    plain = engine.submit_of("plain", "", [1, 2])
    for submit in (held, cancelled, plain):
        engine.engine.submit(submit)
    engine.engine.cancel("cancelled")
    events = [event for _ in range(20) for event in engine.engine.step().events]
    assert {event.uid for event in events} == {"plain"}
    assert events[-1].finish is not None
    assert engine.engine.has_work
    may_read.set()
    assert engine.run().keys() == {"held"}


def test_an_adapter_unloaded_while_it_is_loaded_is_not_kept(directories: dict[str, Path]) -> None:
    base, may_read = directories[""], threading.Event()
    engine = AdaptedEngine(load(base, ATTENTION), base, {}, read_when=may_read)
    engine.begin_load("a1", directories["a1"])
    engine.engine.unload_adapter(engine.keys["a1"])
    may_read.set()
    with pytest.raises(AssertionError, match="missing or have changed"):
        engine.run(engine.submit_of("x", "a1", [1, 2]))


def test_a_load_that_fails_for_lack_of_memory_ends_the_requests_of_its_adapter_only(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = directories[""]
    engine = AdaptedEngine(load(base, ATTENTION), base, {})
    with monkeypatch.context() as memory:
        memory.setattr("tests.lora.engines.read_adapter", Mock(side_effect=RuntimeError("can't allocate memory")))
        engine.keys["a1"] = read_adapter(directories["a1"], read_manifest(base)).key
        engine.load_key(engine.keys["a1"], directories["a1"])
        with pytest.raises(AssertionError, match="missing or have changed"):
            engine.run(engine.submit_of("x", "a1", [1, 2]))
    assert engine.run(engine.submit_of("x", "a1", [1, 2]))["x"]


def test_a_freed_adapter_can_be_loaded_again(directories: dict[str, Path]) -> None:
    base = directories[""]
    engine = AdaptedEngine(load(base, ATTENTION), base, {"a1": directories["a1"]})
    first = engine.run(engine.submit_of("x", "a1", [1, 2, 3]))
    engine.engine.unload_adapter(engine.keys["a1"])
    with pytest.raises(AssertionError, match="missing or have changed"):
        engine.run(engine.submit_of("y", "a1", [1, 2, 3]))
    engine.load("a1", directories["a1"])
    assert engine.run(engine.submit_of("x", "a1", [1, 2, 3])) == first
