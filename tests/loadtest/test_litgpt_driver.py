"""litgpt's driver beside a stand-in for litgpt: one whose rotations are, as litgpt's, in no file of weights."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from loadtest.peers.drivers import protocol
from loadtest.peers.drivers.protocol import Prompts, Wave

Measure = Callable[[Prompts, int], Wave]
MODEL = {"head.weight": torch.tensor([[3.0]])}


class Config:
    """Reads nothing."""

    @classmethod
    def from_file(cls, path: Path) -> "Config":
        """Any file."""
        return cls()


class GPT(torch.nn.Module):
    """The next token is the last one, thrice, and one."""

    head: torch.nn.Linear
    one: torch.Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head = torch.nn.Linear(1, 1, bias=False)
        self.register_buffer("one", torch.ones(()), persistent=False)
        self.max_seq_length = 0
        self.cache: tuple[int, torch.dtype] | None = None

    def clear_kv_cache(self) -> None:
        """As litgpt's."""
        self.cache = None

    def set_kv_cache(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> None:
        """As litgpt's."""
        self.cache = batch_size, dtype

    def next(self, tokens_B: torch.Tensor) -> torch.Tensor:
        """One step of so many sequences as there is room for."""
        assert self.cache == (len(tokens_B), self.head.weight.dtype)
        next_B: torch.Tensor = (self.head(tokens_B[:, None].to(self.head.weight.dtype))[:, 0] + self.one).long()
        return next_B


def batched_generate_fn(model: GPT, prompts: torch.Tensor, max_returned_tokens: int, **given: Any) -> Iterator[Any]:
    """A list of each sequence's token a step."""
    assert given == {"sample_args": {"temperature": 0.0}, "include_prompt": False, "include_eos": False}
    assert model.max_seq_length == max_returned_tokens
    last_B = prompts[:, -1]
    for _ in range(max_returned_tokens - prompts.shape[1]):
        last_B = model.next(last_B)
        yield list(last_B[:, None])


def generate_fn(model: GPT, prompt: torch.Tensor, max_returned_tokens: int, **given: Any) -> Iterator[torch.Tensor]:
    """A token a step."""
    assert given == {"temperature": 0.0, "include_prompt": False, "include_eos": False}
    args = {"sample_args": {"temperature": 0.0}, "include_prompt": False, "include_eos": False}
    for (token,) in batched_generate_fn(model, prompt[None], max_returned_tokens, **args):
        yield token


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """What the driver answers with."""
    modules: dict[str, dict[str, object]] = {
        "litgpt": {},
        "litgpt.config": {"Config": Config},
        "litgpt.model": {"GPT": GPT},
        "litgpt.generate": {},
        "litgpt.generate.base": {"generate_fn": generate_fn, "batched_generate_fn": batched_generate_fn},
    }
    for name, held in modules.items():
        module = ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    served: list[Measure] = []
    monkeypatch.setattr(protocol, "serve", served.append)
    monkeypatch.setattr(sys, "argv", ["driver", str(tmp_path), "bfloat16", str(torch.get_num_threads())])
    monkeypatch.delitem(sys.modules, "loadtest.peers.drivers.litgpt_engine", raising=False)
    torch.save(MODEL, tmp_path / "lit_model.pth")
    driver = importlib.import_module("loadtest.peers.drivers.litgpt_engine")
    monkeypatch.delitem(sys.modules, "loadtest.peers.drivers.litgpt_engine")
    driver.main()
    (made,) = served
    return made


def test_one_sequence_and_a_batch_are_continued(measure: Measure) -> None:
    alone = measure([[7, 2]], 3)
    assert (alone.token_ids, alone.later_tokens) == ([7, 22, 67], 2)
    batch = measure([[7, 1], [7, 2], [5, 2], [9, 9]], 2)
    assert (batch.token_ids, batch.later_tokens) == ([4, 13], 4)
    assert measure([[2]], 1).token_ids == [7]
