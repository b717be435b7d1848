"""Results of an unmodified lm-evaluation-harness with a real server equal those of `kvasir eval` and the server.

Some texts exceed the context, some look like templates, and some have special tokens. The harness uses the server's
tokenizer, which `local-completions` finds by itself, or the exported tokenizer, or it sends texts.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint.manifest import read_manifest
from model.tokenizer.files import load_tokenizer
from service.cli.main import main
from tests.e2e.process import Service, clean_environment, serving

ROOT = Path(__file__).parents[2]
CHECKPOINT = min((ROOT / "checkpoints").glob("*/manifest.json")).parent  # one of this repository
AESOP = (ROOT / "tests" / "data" / "aesop.txt").read_text()
TEXTS = [
    *AESOP.split("\n\n")[:6],
    AESOP[:6000],
    "{{ 1 + 1 }} <|endoftext|> ['a', 'b']",
    "<|endoftext|><|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\nA teller of tales.<|im_end|>\n",
    "42",
    "A 😀 in the café.\n\n\tDone.\n",
]
PAIRS = [
    ("The dogs bark.", "The dogs barks."),
    ("She has eaten the apple.", "She has ate the apple."),
    ("Tom hurt himself.", "Tom hurt herself."),
    ("42", "43"),
]
# Tolerances of a log-likelihood: absolute for a few tokens, relative for a sum over thousands of tokens.
MARGIN: dict[str, Any] = {"abs": 1e-4, "rel": 1e-7}
BEGINNINGS = ["A Fox was", "The king had three sons.", "{{ 1 + 1 }}"]
UNTIL = [".", "\n\n"]
CONTINUATIONS = """\
task: continuations
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: beginning
doc_to_target: ending
target_delimiter: ""
generation_kwargs: {{until: {until}, max_gen_toks: 24, do_sample: false}}
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(CHECKPOINT, tmp_path_factory.mktemp("service"), "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run `kvasir eval`. Return the directory with its documents.jsonl, out.json and tasks/."""
    directory = tmp_path_factory.mktemp("eval")
    (directory / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    rows = [{"sentence_good": good, "sentence_bad": bad} for good, bad in PAIRS]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        *("eval", "--checkpoint", CHECKPOINT, "--device", "cpu", "--threads", "1", "--samples", "0"),
        *("--texts", f"Fables & co={directory / 'texts.jsonl'}", "--pairs", directory / "pairs.jsonl"),
        *("--documents", directory / "documents.jsonl", "--out", directory / "out.json"),
        *("--export-tasks", directory / "tasks"),
    ]
    assert main([*map(str, words)]) == 0
    return directory


@pytest.fixture(scope="module")
def tasks(service: Service, measured: Path) -> Path:
    """Return the directory of the exported tasks and `continuations`, whose targets are the server's completions."""
    rows = []
    for beginning in BEGINNINGS:
        ids = service.post("/tokenize", prompt=beginning, add_special_tokens=False).json()["tokens"]
        ending = service.text(ids, max_tokens=24, temperature=0, stop=UNTIL)
        rows.append(json.dumps({"beginning": beginning, "ending": ending}) + "\n")
    data = measured / "continuations.jsonl"
    data.write_text("".join(rows))
    text = CONTINUATIONS.format(data=json.dumps(str(data)), until=json.dumps(UNTIL))
    (measured / "tasks" / "continuations.yaml").write_text(text)
    return measured / "tasks"


# Runs the harness' command once for each argument list, in one process. No run reads the 14,000 files of the harness'
# own tasks: their index would take 11 s of CPU time.
HARNESS = """\
import functools, json, sys
import lm_eval.tasks
from lm_eval.__main__ import cli_evaluate
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
for words in json.load(sys.stdin):
    sys.argv = ["lm_eval", *words]
    cli_evaluate()
"""
# Documents with special tokens, which `kvasir eval` encodes as text and the harness does not.
MARKED = [number for number, text in enumerate(TEXTS) if "<|" in text]
# Documents that the harness can send as texts: text windows of a longer document would have other tokens.
SHORT = [number for number, text in enumerate(TEXTS) if len(text) < 6000]


@pytest.fixture(scope="module")
def runs(service: Service, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Run the harness three times, without other network access, and return the output directories.

    The runs are: defaults, concurrent requests with an exported tokenizer, and texts instead of token ids.
    """
    directory = tmp_path_factory.mktemp("runs")
    plain, many, texts, tokenizer = (directory / name for name in ("plain", "many", "texts", "tokenizer"))
    assert main(["export-tokenizer", "--checkpoint", str(CHECKPOINT), "--out", str(tokenizer)]) == 0
    others = {"kvasir_minimal_pairs": list(range(len(PAIRS))), "continuations": list(range(len(BEGINNINGS)))}
    crowd = ("--batch_size", "4")
    short = ("--samples", json.dumps({"kvasir_fables_co": SHORT, **others}))
    lists = [
        harness_words(service, tasks, plain),
        harness_words(
            *(service, tasks, many, *crowd), num_concurrent=4, tokenizer_backend="huggingface", tokenizer=tokenizer
        ),
        harness_words(service, tasks, texts, *short, tokenizer_backend="remote", tokenized_requests=False),
    ]
    environment = {
        **clean_environment(),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(directory / "hugging-face"),
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    done = subprocess.run(
        [sys.executable, "-c", HARNESS],
        input=json.dumps(lists),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return plain, many, texts


def harness_words(service: Service, tasks: Path, out: Path, *flags: str, **arguments: object) -> list[str]:
    """Return the arguments of one run of the harness."""
    manifest = read_manifest(CHECKPOINT)
    told = {
        "model": manifest.name,
        "base_url": f"{service.url}/v1/completions",
        "max_length": manifest.config.max_context_length,
        **arguments,
    }
    words = [
        *("--model", "local-completions", "--include_path", tasks, "--log_samples", "--output_path", out),
        *("--model_args", ",".join(f"{name}={value}" for name, value in told.items())),
        *("--tasks", "kvasir_fables_co,kvasir_minimal_pairs,continuations", *flags),
    ]
    return [*map(str, words)]


def samples(out: Path, task: str) -> list[Any]:
    """Return the responses (`resps`) to each document of a task, in the order of the documents."""
    (path,) = out.glob(f"*/samples_{task}_*.jsonl")
    rows = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: row["doc_id"])
    return [row["resps"] for row in rows]


def likelihoods(out: Path) -> list[float]:
    """Return the harness' log-likelihoods of the documents, in order."""
    return [float(responses[0][0]) for responses in samples(out, "kvasir_fables_co")]


def test_results_with_the_tokenizer_of_the_server_equal_kvasir_eval(
    measured: Path, runs: tuple[Path, Path, Path]
) -> None:
    """Compare log-likelihoods of documents and sentences, the accuracy of the pairs, and the generated texts."""
    out, _, _ = runs
    rows = [json.loads(line) for line in (measured / "documents.jsonl").read_text().splitlines()]
    texts, pairs = rows[: len(TEXTS)], rows[len(TEXTS) :]
    theirs = likelihoods(out)
    assert len(theirs) == len(texts) == len(TEXTS)
    for number, row in enumerate(texts):
        if number not in MARKED:
            assert row["loglikelihood_rolling"] == pytest.approx(theirs[number], **MARGIN)
    for row, responses in zip(pairs, samples(out, "kvasir_minimal_pairs"), strict=True):
        good, bad = (float(response[0][0]) for response in responses)
        assert (row["good"], row["bad"]) == (pytest.approx(good, **MARGIN), pytest.approx(bad, **MARGIN))
    (path,) = out.glob("*/results_*.json")
    results: dict[str, Any] = json.loads(path.read_text())["results"]
    accuracy = json.loads((measured / "out.json").read_text())["pairs"]["accuracy"]
    assert results["kvasir_minimal_pairs"]["acc,none"] == accuracy
    assert results["continuations"]["exact_match,none"] == 1.0
    written = [responses[0][0] for responses in samples(out, "continuations")]
    assert len(set(written)) == len(BEGINNINGS)
    assert not any(end in text for text in written for end in UNTIL)


def test_results_are_equal_with_an_exported_tokenizer_and_with_texts(runs: tuple[Path, Path, Path]) -> None:
    plain, many, texts = map(likelihoods, runs)
    assert many == pytest.approx(plain, **MARGIN)
    assert texts == pytest.approx([plain[number] for number in SHORT], **MARGIN)
    pairs = [
        [float(response[0][0]) for responses in samples(out, "kvasir_minimal_pairs") for response in responses]
        for out in runs
    ]
    assert pairs[1] == pytest.approx(pairs[0], **MARGIN)
    assert pairs[2] == pytest.approx(pairs[0], **MARGIN)
    # Token ids of a beginning have no begin-of-text token, and a text gets one.
    assert samples(runs[1], "continuations") == samples(runs[0], "continuations")


def test_the_harness_predicts_the_special_tokens_of_a_text(service: Service, runs: tuple[Path, Path, Path]) -> None:
    tokenizer = load_tokenizer(CHECKPOINT)
    theirs = likelihoods(runs[0])
    assert tokenizer.bos_token_id is not None
    for number in MARKED:
        ids = tokenizer.encode(TEXTS[number], parse_special=True)
        assert {*tokenizer.special_tokens.values()} & {*ids}
        told = service.complete([tokenizer.bos_token_id, *ids], max_tokens=0, echo=True, logprobs=0)
        assert sum(told["choices"][0]["logprobs"]["token_logprobs"][1:]) == pytest.approx(theirs[number], **MARGIN)
