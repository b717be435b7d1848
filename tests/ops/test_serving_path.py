"""Metrics and shared memory say how tokens are computed, before and after our own kernels have been compiled."""

import os
from collections.abc import Callable

import msgspec
import pytest

from model.kernels.levels import LEVELS, Level
from model.kernels.loading import KernelLibrary, Kernels
from service.lifecycle import Lifecycle
from service.metrics import Metrics
from service.serving_path import attention_in_words, path_of
from service.worker import tell_path
from tests.ops.observations import HELLO, scrape


class Loaded(KernelLibrary):
    """Kernels of a level, without a file."""

    def __init__(self, level: Level) -> None:
        self.level = level.name


@pytest.fixture
def lifecycle() -> Lifecycle:
    return Lifecycle(main_pid=os.getpid())


def gauge(kernels: str, level: str = "", attention: str = "sdpa") -> str:
    return (
        f'serving_path{{attention="{attention}",device="cpu",dtype="float32",kernels="{kernels}",level="{level}",'
        'matrices="packed"}'
    )


def paths() -> dict[str, float]:
    return {name: value for name, value in scrape().items() if name.startswith("serving_path")}


@pytest.mark.parametrize("attention", ["sdpa", "eager", "paged (decode: in place, prompts: one by one)"])
def test_other_paths_stay(metrics: Metrics, lifecycle: Lifecycle, attention: str) -> None:
    hello = msgspec.structs.replace(HELLO, attention=attention)
    tell_path(hello, None, lifecycle=lifecycle, metrics=metrics)
    assert paths() == {gauge("pytorch", attention=attention.split()[0]): 1}
    assert lifecycle.kernel_level is None


def test_native_attention_that_waits_for_no_kernels_is_pytorchs(metrics: Metrics, lifecycle: Lifecycle) -> None:
    """As of a model in float64, which ours do not compute."""
    tell_path(HELLO, None, lifecycle=lifecycle, metrics=metrics)
    assert paths() == {gauge("pytorch"): 1}


def test_our_own_serve_when_they_have_taken_over(
    metrics: Metrics, lifecycle: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[Callable[[], None]] = []
    kernels = Kernels()
    monkeypatch.setattr(kernels, "when_serving", waiting.append)
    tell_path(HELLO, kernels, lifecycle=lifecycle, metrics=metrics)
    assert paths() == {gauge("pytorch"): 1}
    kernels.loaded, kernels.serves = Loaded(LEVELS[1]), True
    (told,) = waiting
    told()
    assert paths() == {gauge("pytorch"): 0, gauge("own", LEVELS[1].name, "native"): 1}
    assert lifecycle.kernel_level == LEVELS[1].name


def test_a_later_worker_without_kernels_takes_the_word_back(metrics: Metrics, lifecycle: Lifecycle) -> None:
    kernels = Kernels()
    kernels.loaded, kernels.serves = Loaded(LEVELS[0]), True
    tell_path(HELLO, kernels, lifecycle=lifecycle, metrics=metrics)
    assert (paths(), lifecycle.kernel_level) == ({gauge("own", LEVELS[0].name, "native"): 1}, LEVELS[0].name)
    tell_path(HELLO, Kernels(), lifecycle=lifecycle, metrics=metrics)
    assert lifecycle.kernel_level is None


def test_labels_are_those_that_the_metric_has() -> None:
    path = path_of(HELLO, "avx2")
    assert path.labels == ("own", "avx2", "native", "packed", "float32", "cpu")
    assert path_of(HELLO, None).labels[:2] == ("pytorch", "")


def test_what_is_told_at_the_start_is_what_attends_then() -> None:
    kernels = Kernels()
    assert attention_in_words("native", kernels) == "sdpa; native once its kernels are compiled"
    kernels.loaded = Loaded(LEVELS[0])
    assert attention_in_words("native", kernels) == "sdpa; native once its kernels are compiled", "matrices are packed"
    kernels.serve()
    assert attention_in_words("native", kernels) == "native"


def test_what_never_attends_is_not_told_at_the_start() -> None:
    kernels = Kernels()
    kernels.trouble = "no compiler"
    assert attention_in_words("native", kernels) == attention_in_words("native", None) == "sdpa"
    assert attention_in_words("paged (decode: in place)", None) == "paged (decode: in place)"
