"""Cells of the comparison with other engines, stored pairs, and ratios."""

from pathlib import Path
from typing import Any

import pytest

from loadtest.peers.bench_peers import ComparedPair, PairStore, is_sound
from loadtest.peers.engines import DEFAULTS, Cell, make_cells, random_prompts


def cell(kind: Any = "decode", streams: int = 2, output_tokens: int = 5) -> Cell:
    return Cell(
        shape="S", precision="float32", kind=kind, streams=streams, prompt_tokens=3, output_tokens=output_tokens
    )


def test_a_precision_has_cells_of_all_streams_and_contexts() -> None:
    cells = make_cells(["llama-3.2-1b"], ["int8"], ["decode", "http", "prompt"])
    assert len({made.key for made in cells}) == len(cells) == 4 + 4 + 1 + 4 + 3
    decode = [(made.context_length, made.streams) for made in cells if made.kind == "decode"]
    everything = [(context, streams) for context in (128, 1024, 4096) for streams in (1, 4, 16, 64)]
    assert decode == everything[:-1]  # 64 streams of 4,096 tokens exceed the memory
    assert [made.context_length for made in cells if made.kind == "prompt"] == [1024]
    assert {made.kind for made in make_cells(["S", "M"], ["int8"], ["http"])} == {"http"}
    assert [made.num_prompts for made in cells if made.kind == "http"] == [3, 8, 32, 128]


def test_cells_beyond_the_models_context_are_left_out() -> None:
    assert {made.context_length for made in make_cells(["S"], ["int8"], ["decode"])} == {128, 1024}


def test_ratios_are_taken_within_pairs(tmp_path: Path) -> None:
    pairs = [
        ComparedPair(
            cell=cell().key,
            peer="a",
            round=number,
            ours={"tokens_per_second": o},
            theirs={"tokens_per_second": t},
            other_work_cores=0.0,
        )
        for number, (o, t) in enumerate(((10.0, 5.0), (100.0, 25.0), (9.0, 3.0)))
    ]
    pairs += [ComparedPair(cell=cell().key, peer="b", round=0, error="no engine")]
    pairs += [ComparedPair(cell=cell(streams=9).key, peer="a", round=0, error="of another cell")]
    kept = PairStore(tmp_path / "progress.jsonl")
    kept.pairs = pairs
    (row,) = kept.summarize([cell()], ["a", "b", "c"])
    assert list(row["peers"]) == ["a", "b"]
    assert row["peers"]["a"]["ratio"]["median"] == 3.0  # of 2, 4 and 3, and not 10 over 5
    assert row["peers"]["a"]["ours"]["tokens_per_second"]["values"] == [10.0, 100.0, 9.0]
    assert row["peers"]["b"] == {"error": "no engine"}
    assert (row["streams"], row["context_length"]) == (2, 5)


def test_measured_pairs_are_stored_and_failed_or_disturbed_ones_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "progress.jsonl"
    kept = PairStore(path)
    figures: dict[str, Any] = {"ours": {"x": 1.0}, "theirs": {"x": 2.0}}
    kept.add(ComparedPair(cell=cell().key, peer="a", round=0, **figures, other_work_cores=0.1))
    kept.add(ComparedPair(cell=cell().key, peer="a", round=1, error="why"))
    kept.add(ComparedPair(cell=cell().key, peer="a", round=2, **figures, other_work_cores=0.7))
    with path.open("a") as file:
        file.write('{"cell": "cut o')  # the machine stopped
    again = PairStore(path)
    assert again.pairs == kept.pairs
    assert again.has(cell(), "a", 0)
    assert not again.has(cell(), "a", 1)
    assert not again.has(cell(), "a", 2)
    assert not again.has(cell(), "b", 0)
    assert not again.has(cell(streams=1), "a", 0)


def test_a_figure_is_sound_if_no_pair_was_disturbed() -> None:
    figure = {"ratio": {}, "other_work_cores": [0.0, 0.1], "processors_share": [1.0, 0.9]}
    assert is_sound(figure)
    assert not is_sound(figure | {"other_work_cores": [0.0, 0.3]})
    assert not is_sound(figure | {"processors_share": [1.0, 0.8]})
    assert not is_sound({"error": "none"})


@pytest.mark.parametrize(("streams", "number"), [(1, 3), (16, 32), (64, 64)])
def test_servers_without_flags_get_fewer_requests(streams: int, number: int) -> None:
    cells = make_cells(["S"], [DEFAULTS[0]], ["decode", "http", "prompt"])
    assert [(made.kind, made.streams) for made in cells] == [("http", 1), ("http", 4), ("http", 16), ("http", 64)]
    assert [made.num_prompts for made in cells if made.streams == streams] == [number]
    assert cell("http", streams=64).num_prompts == 128


def test_prompts_are_a_function_of_the_seed_and_all_differ() -> None:
    taken = cell("decode", streams=20)
    first = random_prompts(taken, 50, 1)
    assert first == random_prompts(taken, 50, 1) != random_prompts(taken, 50, 2)
    assert len(set(map(tuple, first))) == 20
    assert max(map(max, random_prompts(taken, 3, 0))) == 1  # the last id ends a text
