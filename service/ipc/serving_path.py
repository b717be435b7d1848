"""Code path that computes tokens, as reported by `GET /ready` and a metric."""

from typing import Literal

import msgspec

from service.ipc.messages import WorkerReady


class ServingPath(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels, attention backend, weight format, dtype and device of a worker.

    kernels: "own" if native kernels compute every step as a whole; "pytorch" if PyTorch's kernels compute the steps.
    level: instruction set of the native kernels; null with "pytorch", which selects its instructions itself.
    attention: attention backend: native, paged, sdpa or eager.
    matrices: weight format: packed, int8, fp8 or plain.
    """

    kernels: Literal["own", "pytorch"]
    level: str | None
    attention: str
    matrices: str
    dtype: str
    device: str

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the metric's label values, in the order of the fields. A null becomes an empty string."""
        return tuple("" if value is None else str(value) for value in msgspec.structs.astuple(self))


def get_serving_path(hello: WorkerReady) -> ServingPath:
    """Return the serving path of a worker."""
    return ServingPath(
        kernels="pytorch" if hello.kernel_level is None else "own",
        level=hello.kernel_level,
        attention=hello.attention.partition(" ")[0],  # "paged" may be followed by details
        matrices=hello.matrices,
        dtype=hello.dtype,
        device=hello.device,
    )
