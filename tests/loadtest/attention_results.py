"""Invented results of `loadtest.inprocess.bench_attention`, in round figures that are easy to check by eye."""

from typing import Any


def spread(median: float) -> dict[str, Any]:
    return {"median": median, "min": 0.9 * median, "max": 1.1 * median, "values": [median]}


def row(title: str, losses: list[float], compared_with: str = "multi-head", **changes: Any) -> dict[str, Any]:
    """A trained row; one run a loss, from seed 1 on."""
    runs = [
        {
            "seed": seed,
            "nats_per_token": loss,
            "bits_per_byte": loss / 3,
            "train_seconds": 60.0,
            "commit": "abcdef",
            "curve": [[100, loss + 1], [200, loss + 0.5], [300, loss]],
        }
        for seed, loss in enumerate(losses, start=1)
    ]
    return {
        "title": title,
        "compared_with": compared_with,
        "changes": changes,
        "parameters": 1_000_000,
        "kv_bytes_per_token": 4096,
        "runs": runs,
    }


def speeds(trained: float, served: float) -> dict[str, Any]:
    return {
        "trained_tokens_per_second": spread(trained),
        "trained_ratio": spread(trained / 10_000),
        "served_tokens_per_second": spread(served),
        "served_ratio": spread(served / 1_000),
    }


FACTS: dict[str, Any] = {
    "date": "2026-01-02 03:04 UTC",
    "commit": "fedcba",
    "machine": {"processor": "Abacus", "cores": 2, "memory_gib": 24.0, "system": "Linux"},
    "other_work_cores": 0.04,
    "took_seconds": 123.4,
    "versions": {"python": "3.11.2", "torch": "2.13.0"},
}
RESULTS: dict[str, Any] = {
    "kind": "attention",
    "train": FACTS
    | {
        "command": "python -m loadtest.inprocess.bench_attention train --seeds 1 2",
        "settings": {
            "seeds": [1, 2],
            "steps": 600,
            "batch_size": 8,
            "sequence_length": 256,
            "vocab_size": 2048,
            "kv_bytes_per_value": 4,
            "precision": ["bfloat16"],
            "hardware": ["an abacus"],
            "train_minutes": 8,
        },
        "rows": {
            "multi-head": row("the baseline", [3.0, 3.02]),
            "learned": row("learned positions", [3.2, 3.22], position="learned"),
            "average": row("simple average", [3.9, 3.92], "learned", attention="average"),
            "alibi": row("linear biases", [3.01, 2.99], position="alibi"),
        },
    },
    "speed": FACTS
    | {
        "command": "python -m loadtest.inprocess.bench_attention speed",
        "settings": {
            "rounds": 7,
            "threads": 1,
            "train_steps": 8,
            "train_precision": "bfloat16",
            "streams": 16,
            "prompt_tokens": 64,
            "output_tokens": 64,
            "serve_dtype": "float32",
        },
        "rows": {
            "multi-head": speeds(10_000, 1_000),
            "learned": speeds(11_000, 1_100),
            "average": speeds(12_000, 1_200),
            "alibi": speeds(9_000, 900),
            "eager": speeds(8_000, 800),
        },
        "kernels": [
            {
                "length": 2048,
                "score_bytes": 67_108_864,
                "eager_ms": spread(60.0),
                "fused_ms": spread(20.0),
                "ratio": spread(3.0),
            }
        ],
    },
}
