"""The code path that computes tokens, as `GET /ready` and a metric report it."""

from typing import Literal

import msgspec

from service.messages import Hello


class ServingPath(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels, attention backend, weight format, dtype and device of a worker.

    kernels: own where the native kernels compute every step whole, by the instructions of `level`; pytorch where
        PyTorch's kernels do, which choose their instructions themselves: `level` is null.
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
        """Label values of the metric, in the order of the fields; null becomes empty."""
        return tuple("" if value is None else str(value) for value in msgspec.structs.astuple(self))


def path_of(hello: Hello) -> ServingPath:
    """Return the path of a worker."""
    return ServingPath(
        kernels="pytorch" if hello.kernel_level is None else "own",
        level=hello.kernel_level,
        attention=hello.attention.partition(" ")[0],  # paged is followed by its parts
        matrices=hello.matrices,
        dtype=hello.dtype,
        device=hello.device,
    )
