"""Tasks of lm-evaluation-harness: written files, and rejected input."""

import json
from pathlib import Path

import pytest
import yaml

from model.evaluation.harness import export_tasks
from model.evaluation.minimal_pairs import Pair
from model.io.files import OneLineError

TEXTS = ['{{ 7 }} "quoted"\n\n{% raw %}', "42", "['a']", "😀 \u2028 é"]
PAIR = Pair(good="The dogs bark.", bad="The dogs barks.", group="agreement")


def test_texts_and_pairs_are_written_as_harness_tasks(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "tasks"
    assert export_tasks(directory, {"Fairy tales": TEXTS}, [PAIR]) == ["kvasir_fairy_tales", "kvasir_minimal_pairs"]
    task = yaml.safe_load((directory / "kvasir_fairy_tales.yaml").read_text())
    assert (task["task"], task["output_type"]) == ("kvasir_fairy_tales", "loglikelihood_rolling")
    data = Path(task["dataset_kwargs"]["data_files"]["test"])
    assert data.is_absolute()
    rows = [json.loads(line) for line in data.read_text().split("\n")[:-1]]
    assert [row[task["doc_to_target"]] for row in rows] == TEXTS
    task = yaml.safe_load((directory / "kvasir_minimal_pairs.yaml").read_text())
    assert (task["output_type"], task["doc_to_target"], task["target_delimiter"]) == ("multiple_choice", 0, "")
    (row,) = [json.loads(line) for line in Path(task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()]
    assert row[task["doc_to_choice"]] == [PAIR.good, PAIR.bad]


def test_an_earlier_task_export_is_replaced_and_other_files_are_kept(tmp_path: Path) -> None:
    directory = tmp_path / 'it"s here'
    assert export_tasks(directory, {"a": ["x"]}, []) == ["kvasir_a"]
    assert export_tasks(directory, {"a": ["y"]}, []) == ["kvasir_a"]
    task = yaml.safe_load((directory / "kvasir_a.yaml").read_text())
    assert "y" in Path(task["dataset_kwargs"]["data_files"]["test"]).read_text()
    (directory / "notes.txt").write_text("mine")
    with pytest.raises(OneLineError, match=r"holds notes\.txt; choose an empty or a new directory"):
        export_tasks(directory, {"a": ["x"]}, [])
    with pytest.raises(OneLineError, match="choose another directory"):
        export_tasks(directory / "notes.txt", {"a": ["x"]}, [])


@pytest.mark.parametrize(("splits", "pairs"), [({"a b": ["x"], "a-b": ["y"]}, []), ({"Minimal pairs": ["x"]}, [PAIR])])
def test_two_splits_with_the_same_task_name_are_rejected(
    tmp_path: Path, splits: dict[str, list[str]], pairs: list[Pair]
) -> None:
    with pytest.raises(OneLineError, match="have the same task name"):
        export_tasks(tmp_path, splits, pairs)
