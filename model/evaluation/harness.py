"""Export of held-out texts and minimal pairs as tasks for an unmodified lm-evaluation-harness (EleutherAI).

A task is a YAML file and the JSON Lines file that it names. The text fields in the YAML file are column names, never
templates, so a text with template syntax reaches the model unchanged. Torch-free.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from model.evaluation.minimal_pairs import Pair

PREFIX = "kvasir_"
PAIRS_NAME = "minimal_pairs"
_TEXTS: dict[str, Any] = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "text",
    "metric_list": [{"metric": name} for name in ("bits_per_byte", "byte_perplexity", "word_perplexity")],
}
_PAIRS: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "",
    "doc_to_target": 0,
    "doc_to_choice": "choices",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


class HarnessError(ValueError):
    """Tasks cannot be written. The message is one line with the path, the problem and the remedy."""


def export_tasks(directory: Path, splits: Mapping[str, Sequence[str]], pairs: Sequence[Pair]) -> list[str]:
    """Write one task for each split and one for the pairs, if any. Return the task names, which begin with "kvasir_".

    A task names its data file by the absolute path, so do not move the directory.

    Raises:
        HarnessError: the directory holds other files or cannot be written, or two splits have the same task name.
    """
    tasks = {task_name(name): (_TEXTS, _lines({"text": text} for text in texts)) for name, texts in splits.items()}
    names = [*splits, *([PAIRS_NAME] if pairs else [])]
    if pairs:
        rows = ({"choices": [pair.good, pair.bad], "group": pair.group} for pair in pairs)
        tasks[task_name(PAIRS_NAME)] = (_PAIRS, _lines(rows))
    if len({task_name(name) for name in names}) < len(names):
        raise HarnessError(f"two of {', '.join(names)} have the same task name; rename one")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        others = sorted(path.name for path in directory.iterdir() if not path.name.startswith(PREFIX))
        if others:
            raise HarnessError(f"{directory}: holds {others[0]}; choose an empty or a new directory")
        for name, (scoring, lines) in tasks.items():
            data = directory.resolve() / f"{name}.jsonl"
            data.write_text(lines)
            source = {
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(data)}},
                "test_split": "test",
            }
            task = {"task": name, **source, **scoring, "metadata": {"version": 1.0}}
            (directory / f"{name}.yaml").write_text(json.dumps(task, indent=2) + "\n")  # JSON is valid YAML
    except OSError as error:
        raise HarnessError(f"{directory}: {error.strerror}; choose another directory") from error
    return list(tasks)


def task_name(split: str) -> str:
    """Return the task name of a split or of `PAIRS_NAME`."""
    return PREFIX + re.sub(r"\W+", "_", split.lower(), flags=re.ASCII)


def _lines(rows: Iterable[object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
