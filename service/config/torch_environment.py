"""Environment variables of torch's libraries, and their loading ahead of the import of torch."""

import ctypes
import importlib.util
import os
import threading

TORCH_ENVIRONMENT = {
    # PyTorch's operators run on OpenMP threads, unlike the native kernels. These threads sleep while they wait for each
    # other. By default they spin, and one busy neighbour, such as the API process, then makes a step 100 times slower
    # (540 ms instead of 6 ms; two threads on two cores).
    "OMP_WAIT_POLICY": "PASSIVE",
    # A short spin comes before the sleep, since parallel regions within a step are microseconds apart. With the spin,
    # throughput is 1.8 times as high on two idle cores, and 0.4 to 0.7 times beside a process that is always busy
    # (docs/performance-log.md).
    "GOMP_SPINCOUNT": "3000",
    # oneDNN and PyTorch's bridge to it each cache kernels of 1,024 shapes, and every batch size is a new shape. 300
    # batch sizes took 715 MB, and take 77 MB with this limit (five matrices of 9.3 million parameters, float32).
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
}
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def set_torch_environment() -> None:
    """Set the variables of `TORCH_ENVIRONMENT` that are not set yet. Call before torch is imported.

    Processes that this process starts later inherit the variables.
    """
    for variable, value in TORCH_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)


def load_torch_ahead() -> None:
    """Load torch's largest library in a thread, while this process imports other modules. Errors are ignored.

    The import of torch needs 0.2 s for this library, in which it holds the GIL.
    """
    if (spec := importlib.util.find_spec("torch")) is not None and spec.origin is not None:
        path = os.path.join(os.path.dirname(spec.origin), "lib", "libtorch_cpu.so")
        load = ctypes.CDLL(None).dlopen
        threading.Thread(target=load, args=(os.fsencode(path), os.RTLD_NOW), daemon=True).start()


def mig_instances() -> list[str]:
    """Return the names of MIG instances in CUDA_VISIBLE_DEVICES; [] if it names none."""
    names = os.environ.get(_VISIBLE_DEVICES, "").split(",")
    return [name.strip() for name in names if name.strip().startswith("MIG-")]


def use_mig_instance(name: str) -> None:
    """Let this process see one MIG instance. A process sees only the first that the variable names.

    Call before CUDA is initialized.
    """
    os.environ[_VISIBLE_DEVICES] = name
