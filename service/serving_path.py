"""By which path tokens are computed, as `GET /ready` and a metric tell it: PyTorch's kernels, then our own in their
place once they are loaded, between two steps.
"""

from typing import Literal

import msgspec

from model.kernels.loading import Kernels
from service.messages import Hello


class ServingPath(msgspec.Struct, frozen=True, kw_only=True):
    """Whose kernels compute, how, in which numbers, where.

    kernels: own where our own compute every step whole, by the instructions of `level`; pytorch where PyTorch's do,
        which choose their instructions themselves: `level` is null.
    attention: native, paged, sdpa or eager.
    matrices: packed, int8, fp8 or plain.
    """

    kernels: Literal["own", "pytorch"]
    level: str | None
    attention: str
    matrices: str
    dtype: str
    device: str

    @property
    def labels(self) -> tuple[str, ...]:
        """Of the metric, in the order of the fields; what is null is empty."""
        return tuple("" if value is None else str(value) for value in msgspec.structs.astuple(self))


def path_of(hello: Hello, level: str | None) -> ServingPath:
    """The path of a worker by whose hello attention is `native` where our own kernels are wanted.

    Args:
        level: of our own kernels, None while there are none: then PyTorch's fused ones attend.
    """
    return ServingPath(
        kernels="pytorch" if level is None else "own",
        level=level,
        attention=_attends(hello.attention.partition(" ")[0], level),  # paged has its parts behind it
        matrices=hello.matrices,
        dtype=hello.dtype,
        device=hello.device,
    )


def attention_in_words(attention: str, kernels: Kernels | None) -> str:
    """What attends as a worker begins to serve, and what will, for the settings' values in force.

    Args:
        attention: as it was chosen.
        kernels: our own, that compute every step once they are loaded; None where there are none for the model.
    """
    level = kernels.loaded.level if kernels is not None and kernels.serves and kernels.loaded is not None else None
    attends = _attends(attention, level)
    is_compiling = kernels is not None and level is None and kernels.trouble is None
    return f"{attends}; {attention} once its kernels are compiled" if is_compiling else attends


def _attends(attention: str, level: str | None) -> str:
    return "sdpa" if attention == "native" and level is None else attention
