"""The attention kernel never reads past the bias buffer: an inaccessible page follows it."""

import ctypes
import dataclasses
import mmap

import pytest
import torch
from torch import Tensor

from model.attention import native as native_module
from model.attention.backends import EagerAttention
from model.attention.score_biases import AlibiBias
from tests.model.attention.test_native_attention import FORM, TOLERANCES, Scene
from tests.model.configs import VARIANTS
from tests.model.kernel_libraries import BUILDABLE, library_of

_PROT_NONE = 0


def before_a_wall(tensor: Tensor) -> Tensor:
    """Return a copy that ends at the end of its last page; reading past it raises SIGSEGV."""
    room = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    wall = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + room
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(wall), ctypes.c_size_t(mmap.PAGESIZE), _PROT_NONE) == 0
    placed = torch.frombuffer(memory, dtype=tensor.dtype, offset=room - tensor.nbytes, count=tensor.numel())
    return placed.view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("way", BUILDABLE)
@pytest.mark.parametrize("num_queries", [1, 50, 96, 130])
def test_the_kernel_reads_no_bias_past_the_buffer(way: str, num_queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    biases = native_module.position_biases
    monkeypatch.setattr(native_module, "position_biases", lambda *given: before_a_wall(biases(*given)))
    scene = Scene((4, 4, 64, 16), [(num_queries, num_queries)])
    form = dataclasses.replace(
        FORM, bias=AlibiBias(dataclasses.replace(VARIANTS["none"], num_heads=4, num_kv_heads=4), None)
    )
    (ours,), (expected,) = (
        scene.attend(backend, form) for backend in (native_module.NativeAttention(library_of(way)), EagerAttention())
    )
    torch.testing.assert_close(ours, expected, atol=TOLERANCES[torch.float32], rtol=TOLERANCES[torch.float32])
