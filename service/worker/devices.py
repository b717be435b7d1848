"""Device of a worker: the CPU or a GPU, and of several workers each worker's own GPU or share of the CPUs."""

import os

import torch

from model.system.limits import cpu_shares, usable_cpus
from service.config.settings import ModelSettings, SettingsError
from service.config.torch_environment import mig_instances, use_mig_instance
from service.worker.memory_plan import ServerNeeds


def take_device(settings: ModelSettings, server: ServerNeeds) -> ModelSettings:
    """Return the settings of one of several workers: with its own GPU, or for its share of the CPUs.

    On a CPU, this thread and all that it starts later are bound to the share, and allocate their memory near it.

    Raises:
        SettingsError: there are more workers than devices, or --device names one GPU.
    """
    count, index = server.num_workers, server.worker_index
    if ":" in settings.device:
        raise SettingsError(
            f"--device {settings.device} names one GPU, but each of the --devices {count} workers needs its own; "
            "leave out --device or --devices"
        )
    instances = mig_instances() if settings.device != "cpu" else []
    num_gpus = len(instances) or (torch.cuda.device_count() if settings.device != "cpu" else 0)
    if settings.device == "cpu" or (settings.device == "auto" and not num_gpus):
        num_devices, kind = usable_cpus(), "CPUs"
    else:
        num_devices, kind = num_gpus, "GPUs"
    if num_devices < count:
        raise SettingsError(f"--devices {count} needs {count} {kind}, but {num_devices} are available; lower --devices")
    if kind == "CPUs":
        os.sched_setaffinity(0, cpu_shares(count)[index])
        return settings.model_copy(update={"device": "cpu"})
    if instances:
        use_mig_instance(instances[index])
    return settings.model_copy(update={"device": "cuda" if instances else f"cuda:{index}"})


def find_device(wanted: str) -> str:
    """Return the device of a --device setting. Raises `SettingsError` if this machine has no such device.

    A GPU with a number becomes the current device: streams, Triton's kernels and free memory are the current device's.
    """
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return wanted
    if not torch.cuda.is_available():
        raise SettingsError(f"--device {wanted}: no CUDA device is available; check the driver, or give --device cpu")
    _, _, number = wanted.partition(":")
    if number and int(number) >= (count := torch.cuda.device_count()):
        names = "only cuda:0 is" if count == 1 else f"cuda:0 to cuda:{count - 1} are"
        raise SettingsError(f"--device {wanted}: {names} visible; choose another, or change CUDA_VISIBLE_DEVICES")
    if number:
        torch.cuda.set_device(int(number))
    return wanted
