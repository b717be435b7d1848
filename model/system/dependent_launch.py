"""Programmatic dependent launch of Triton kernels: a kernel starts while the last programs of the kernel before it run.

That hides its start-up. Before it reads or writes memory, it waits until the kernel before it is complete, and with it
all earlier ones. Source: CUDA programming guide, "Programmatic Dependent Launch and Synchronization". Needs triton, and
compute capability 9.0 (Hopper) on a GPU; elsewhere kernels are launched as usual.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disallow-untyped-decorators=False
# mypy: disallow-incomplete-defs=False

import functools

import torch
import triton
import triton.language as tl

_CAPABILITY = (9, 0)


@functools.cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """Return the options of each launch on a device: Triton's `launch_pdl`, and the constant that `begin` takes."""
    is_possible = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY
    return {"launch_pdl": is_possible, "IS_DEPENDENT": is_possible}


@triton.jit
def begin(IS_DEPENDENT: tl.constexpr):
    """Wait for the kernel before this one, and let the next kernel start. Must come before all reads and writes."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
