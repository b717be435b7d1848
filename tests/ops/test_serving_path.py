"""Metrics and `/ready` report the code path that computes tokens."""

import msgspec
import pytest

from service.ipc.serving_path import get_serving_path
from service.metrics.recorder import Metrics
from tests.ops.observations import HELLO, scrape


def paths(metrics: Metrics) -> dict[str, float]:
    return {name: value for name, value in scrape(metrics).items() if name.startswith("serving_path")}


@pytest.mark.parametrize("attention", ["sdpa", "eager", "paged (decode: in place, prompts: one by one)"])
def test_a_path_of_pytorchs_kernels(metrics: Metrics, attention: str) -> None:
    hello = msgspec.structs.replace(HELLO, attention=attention, kernel_level=None)
    metrics.observe_worker_start(hello, get_serving_path(hello))
    labels = f'attention="{attention.split()[0]}",device="cpu",dtype="float32",kernels="pytorch",level="",'
    assert paths(metrics) == {f'serving_path{{{labels}matrices="packed"}}': 1}


def test_labels_are_those_that_the_metric_has() -> None:
    assert get_serving_path(HELLO).labels == ("own", "avx2", "native", "packed", "float32", "cpu")
    assert get_serving_path(msgspec.structs.replace(HELLO, kernel_level=None)).labels[:2] == ("pytorch", "")
