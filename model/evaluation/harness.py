"""Export of held-out texts and minimal pairs as tasks for an unmodified lm-evaluation-harness (EleutherAI).

A task names columns of its JSON Lines file and has no templates, so template syntax in a text is not evaluated.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from model.evaluation.minimal_pairs import Pair
from model.io.files import OneLineError

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


def export_tasks(directory: Path, splits: Mapping[str, Sequence[str]], pairs: Sequence[Pair]) -> list[str]:
    """Write one task for each split of held-out texts, and one for the minimal pairs, if any. Return the task names.

    A task is a YAML file with the absolute path of its JSON Lines file, so the directory must not be moved.

    Raises:
        OneLineError: the directory holds files of another origin or cannot be written, or two task names are equal.
    """
    data: dict[str, tuple[dict[str, Any], Iterable[object]]] = {
        name: (_TEXTS, ({"text": text} for text in texts)) for name, texts in splits.items()
    }
    if pairs:
        data[PAIRS_NAME] = (_PAIRS, ({"choices": [pair.good, pair.bad], "group": pair.group} for pair in pairs))
    tasks = {PREFIX + re.sub(r"\W+", "_", name.lower(), flags=re.ASCII): task for name, task in data.items()}
    if len(tasks) < len(data):
        raise OneLineError(f"task export: two of the splits {', '.join(data)} have the same task name; rename one")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        others = sorted(path.name for path in directory.iterdir() if not path.name.startswith(PREFIX))
        if others:
            raise OneLineError(f"{directory}: holds {others[0]}; choose an empty or a new directory for the tasks")
        for name, (scoring, rows) in tasks.items():
            path = directory.resolve() / f"{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            task = {
                "task": name,
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(path)}},
                "test_split": "test",
                **scoring,
                "metadata": {"version": 1.0},
            }
            (directory / f"{name}.yaml").write_text(json.dumps(task, indent=2) + "\n")  # JSON is valid YAML
    except OSError as error:
        raise OneLineError(f"{directory}: {error.strerror}; choose another directory") from error
    return list(tasks)
