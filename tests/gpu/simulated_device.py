"""Simulated CUDA device: tensors that report a CUDA device and are computed on the CPU, by the rules of a GPU.

    with SimulatedDevice() as device: ...      # torch.cuda is a stand-in here

The device refuses (`RefusedError`) what a GPU refuses: a kernel with tensors of two devices, and during a CUDA graph
capture whatever waits for the GPU, copies pageable memory or reads a number. A captured kernel is not computed, and its
result is poisoned with NaN. A replay computes the captured kernels over the same memory and the same Python numbers.
`counts` and `lines` count host waits, copies and kernels, and name the product's line.

Copies from and to pinned memory are asynchronous. Their data arrive when the host waits for an event recorded after the
copy. The device refuses a change of the source before that. Triton kernels are computed by the formulas of
`tests.gpu.simulated_kernels`. Of the host's memory, they may read pinned tensors ("pinned reads"), which must neither
change nor be freed before the host has waited for the kernel.
"""

import contextlib
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.gpu.simulated_kernels import FORMULAS, flash_attention

CUDA: Final = torch.device("cuda", 0)
TOTAL_BYTES, _RESERVED_BYTES = 2**28, 2**24
_aten = torch.ops.aten
# The shape of the result depends on numbers in a tensor, so the host waits.
_SHAPED_BY_NUMBERS = {"aten::nonzero", "aten::_unique2", "aten::unique_dim", "aten::masked_select"}
_NUMBER_READS = {"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero"}
_NUMBER_METHODS = [getattr(Tensor, name) for name in ("__float__", "__int__", "__bool__", "__index__", "item")]


class RefusedError(RuntimeError):
    """Error for an operation that a GPU refuses, or whose result would be undefined on a GPU."""


class SimulatedTensor(Tensor):
    """Tensor of the simulated device; `held` is a tensor of the CPU with the numbers."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=torch.device("meta"), dispatch_device=True, requires_grad=held.requires_grad,
        )  # fmt: skip
        return made

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return SimulatedDevice.current().dispatch(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.held})"


class _Graph:
    """Stand-in for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.kernels: list[Callable[[], object]] = []

    def replay(self) -> None:
        device = SimulatedDevice.current()
        device.refuse_in_capture("a replay")
        device.counts["replays"] += 1
        device.counts["replayed kernels"] += len(self.kernels)
        with _disable_current_modes():
            for compute in self.kernels:
                compute()

    def pool(self) -> tuple[int, int]:
        return (0, 1)


class _Stream:
    """Stand-in for `torch.cuda.Stream`. All work runs in the order of its launch."""

    def wait_stream(self, other: "_Stream") -> None:
        pass


class _Event:
    """Stand-in for `torch.cuda.Event`."""

    _copies_before = 0

    def __init__(self, blocking: bool = False) -> None:
        self._wait = "event, asleep" if blocking else "event"

    def record(self) -> None:
        self._copies_before = SimulatedDevice.current().num_copies

    def synchronize(self) -> None:
        SimulatedDevice.current().wait(self._wait, until=self._copies_before)


class _Functions(TorchFunctionMode):
    """Replacement of calls whose C++ code would ask for a device that this PyTorch has not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = SimulatedDevice.current()
        kwargs = {name: _indexed(value, name) for name, value in (kwargs or {}).items()}
        args = tuple(map(_indexed, args))
        first = args[0] if args else None
        if func is Tensor.to and len(args) > 1 and args[1] == "cuda":
            args = (first, CUDA, *args[2:])
        if func is Tensor.cuda:
            return args[0].to(CUDA)
        if func is torch.tensor and kwargs.get("device") == CUDA:
            device.count_copy("in", is_pinned=False)
            return SimulatedTensor(torch.tensor(*args, **{k: v for k, v in kwargs.items() if k != "device"}))
        if func is Tensor.copy_ and any(isinstance(x, SimulatedTensor) for x in args):
            return device.dispatch(_aten.copy_.default, args, kwargs)
        if func is Tensor.__invert__:
            return torch.bitwise_not(args[0])
        if func is Tensor.is_pinned:
            return device.is_pinned(args[0])
        if isinstance(first, SimulatedTensor):
            if func in _NUMBER_METHODS:
                device.wait("number")
                return func(first.held)
            if func is Tensor.__getitem__:
                return device.getitem(*args)
            if func is Tensor.__setitem__:
                return device.setitem(*args)
            if func is Tensor.tolist:
                device.count_copy("out", is_pinned=False)
                return first.held.tolist()
            if func is functional.scaled_dot_product_attention:
                return device.compute(func, args, kwargs)
            if func is Tensor.numpy:
                raise RefusedError("a tensor of a GPU cannot become a NumPy array")
            if func is torch.as_tensor and not kwargs:
                return first
        return func(*args, **kwargs)


class SimulatedDevice(TorchDispatchMode):
    """Simulated CUDA device, in use while the context is entered.

    counts: "wait ..." (of the host), "copy in", "copy out", "pageable copy", "kernels", "replays" and others.
    lines: the same waits and copies with the product's line.
    """

    _here: "SimulatedDevice | None" = None

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()
        self.num_copies = 0
        self._capability = capability
        self._graph: _Graph | None = None
        self._arrivals: list[Callable[[], None]] = []  # of asynchronous copies, the oldest first
        self._context = contextlib.ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that PyTorch does not import torch._dynamo for this class, which takes seconds."""
        return False

    @classmethod
    def current(cls) -> "SimulatedDevice":
        assert cls._here is not None, "a tensor of a simulated device was used after the device"
        return cls._here

    def refuse_in_capture(self, what: str) -> None:
        if self._graph is not None:
            raise RefusedError(f"{what} during a CUDA graph capture")

    def wait(self, what: str, until: int | None = None) -> None:
        """Count a wait of the host, until the device has done its first `until` copies (None: all)."""
        self.refuse_in_capture(f"wait: {what}")
        self._count(f"wait {what}")
        num_done = len(self._arrivals) if until is None else until - (self.num_copies - len(self._arrivals))
        for _ in range(num_done):
            self._arrivals.pop(0)()

    def count_copy(self, way: str, *, is_pinned: bool, is_asynchronous: bool = False) -> None:
        """Count a copy between host and device, `way` "in" or "out". A copy of pageable memory makes the host wait."""
        self._count(f"copy {way}")
        if not is_pinned:
            self._count("pageable copy")
        if not (is_pinned and is_asynchronous):
            self.wait(f"copy {way}")

    def _count(self, what: str) -> None:
        self.counts[what] += 1
        frame = sys._getframe(1)
        while frame.f_back is not None and not _PRODUCT.search(frame.f_code.co_filename):
            frame = frame.f_back
        self.lines[f"{what}: {frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"] += 1

    def is_pinned(self, x: Tensor) -> bool:
        """Return whether a tensor of the host is in pinned memory."""
        return hasattr(x if x._base is None else x._base, "is_pinned_here")

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute an operation of PyTorch, or capture it, if it has tensors of this device."""
        if func is torch.ops.prim.device.default:
            return CUDA
        name = func._schema.name
        leaves = _leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        ours = [x for x in tensors if isinstance(x, SimulatedTensor)]
        target = kwargs.get("device")
        is_for_device = target is not None and torch.device(target).type == "cuda"
        if kwargs.get("pin_memory"):
            self.refuse_in_capture("an allocation of pinned memory")
            made: Tensor = func(*args, **{**kwargs, "pin_memory": False})
            made.is_pinned_here = True  # type: ignore[attr-defined]
            return made
        if not ours and not is_for_device:
            return func(*args, **kwargs)
        if name == "aten::_to_copy":
            return self._to_copy(func, args[0], kwargs)
        if name == "aten::copy_" and isinstance(args[0], SimulatedTensor) != isinstance(args[1], SimulatedTensor):
            is_asynchronous = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            return self._copy(args[0], args[1], is_asynchronous=is_asynchronous)
        if name in _NUMBER_READS:
            self.wait("number")
            return func(*_mapped(_held, args), **_mapped(_held, kwargs))
        if any(x.dim() > 0 and not isinstance(x, SimulatedTensor) for x in tensors):
            raise RefusedError(f"{name} with tensors of two devices")
        if name in _SHAPED_BY_NUMBERS or (
            name == "aten::repeat_interleave" and kwargs.get("output_size") is None and len(args) < 3
        ):
            self.wait("shape")
        if (
            name == "aten::cumsum"
            and tensors[0].is_floating_point()
            and tensors[0].numel() == tensors[0].shape[args[1]]
        ):
            raise RefusedError(f"{name} of a single row, whose last bits may vary")
        if is_for_device:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if name == "aten::_flash_attention_forward":
            self.refuse_in_capture("attention whose lengths are Python numbers")
            return self.compute(flash_attention, args, kwargs)
        return self.compute(func, args, kwargs)

    def _to_copy(self, func: Any, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        target, is_ours = kwargs.get("device"), isinstance(x, SimulatedTensor)
        becomes_ours = is_ours if target is None else torch.device(target).type == "cuda"
        given = kwargs if target is None else {**kwargs, "device": torch.device("cpu")}
        if is_ours and becomes_ours:
            made: Tensor = self.compute(func, (x,), given)
            return made
        copied = torch.empty(x.shape, dtype=kwargs.get("dtype") or x.dtype)
        result = SimulatedTensor(copied) if becomes_ours else copied
        return self._copy(result, x, is_asynchronous=bool(kwargs.get("non_blocking", False)))

    def _copy(self, target: Tensor, source: Tensor, *, is_asynchronous: bool) -> Tensor:
        """Copy between host and device, in the way of `Tensor.copy_`."""
        if source.dim() == 0 and not isinstance(source, SimulatedTensor):  # a number, passed with the kernel
            result: Tensor = self.compute(_aten.copy_.default, (target, source), {})
            return result
        self.refuse_in_capture("a copy between host and device")
        is_in = isinstance(target, SimulatedTensor)
        is_pinned = self.is_pinned(source if is_in else target)
        self.count_copy("in" if is_in else "out", is_pinned=is_pinned, is_asynchronous=is_asynchronous)
        data = _held(source).to(target.dtype, copy=True)
        if not (is_pinned and is_asynchronous):
            _held(target).copy_(data)
            return target
        if is_in:
            _held(target).copy_(data)

            def arrive() -> None:
                if not torch.equal(source, data):
                    raise RefusedError("pinned memory was changed before its copy was done")
        else:
            _poison(target)

            def arrive() -> None:
                target.copy_(data.view(target.shape))

        self.num_copies += 1
        self._arrivals.append(arrive)
        return target

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute an operation on the held tensors, or capture it, and return its results as tensors of this device."""
        held_args, held_kwargs = _mapped(_held, args), _mapped(_held, kwargs)
        owners = {id(x.held): x for x in _leaves((args, kwargs)) if isinstance(x, SimulatedTensor)}
        schema = getattr(func, "_schema", None)
        is_view = schema is not None and any(r.alias_info is not None for r in schema.returns) and not schema.is_mutable

        def run() -> Any:
            return func(*held_args, **held_kwargs)

        def wrapped(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return owners[id(x)] if id(x) in owners else SimulatedTensor(x)

        if self._graph is None or is_view:
            self.counts["kernels"] += not is_view
            with _disable_current_modes():
                made = run()
            return _mapped(wrapped, made)
        if schema is not None and schema.is_mutable:
            self._graph.kernels.append(run)
            named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
            written = [named[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            return written[0] if len(written) == 1 else tuple(written)
        with _disable_current_modes():
            made = run()
        outs = [x for x in _leaves(made) if isinstance(x, Tensor)]
        memory = {x.held.untyped_storage().data_ptr() for x in owners.values()}
        if all(x.untyped_storage().data_ptr() not in memory for x in outs):

            def again() -> None:
                for out, new in zip(outs, (x for x in _leaves(run()) if isinstance(x, Tensor)), strict=True):
                    out.copy_(new)

            self._graph.kernels.append(again)
            for out in outs:
                _poison(out)
        return _mapped(wrapped, made)

    def launch(self, compute: Callable[[], object]) -> None:
        """Run or capture a kernel that returns nothing."""
        if self._graph is not None:
            self._graph.kernels.append(compute)
        else:
            self.counts["kernels"] += 1
            with _disable_current_modes():
                compute()

    def _index(self, index: Any) -> tuple[Any, bool]:
        """Return an index over the held tensors, and whether it selects a view."""
        is_view = True
        for x in index if isinstance(index, tuple) else (index,):
            if isinstance(x, Tensor):
                is_view = False
                if x.dtype in (torch.bool, torch.uint8):
                    self.wait("shape")
                if not isinstance(x, SimulatedTensor):
                    self.count_copy("in", is_pinned=self.is_pinned(x))
            elif isinstance(x, (list, range)):
                is_view = False
                self.count_copy("in", is_pinned=False)
        return _mapped(_held, index), is_view

    def getitem(self, x: SimulatedTensor, index: Any) -> Tensor:
        at, is_view = self._index(index)
        with _disable_current_modes():
            made = x.held[at]
        if not is_view:
            held = x.held
            if self._graph is not None:
                _poison(made)
            self.launch(lambda: made.copy_(held[at]))
        return SimulatedTensor(made)

    def setitem(self, x: SimulatedTensor, index: Any, value: Any) -> None:
        held, (at, _) = x.held, self._index(index)
        if isinstance(value, Tensor) and not isinstance(value, SimulatedTensor) and value.dim():
            self.count_copy("in", is_pinned=self.is_pinned(value))
        given = _held(value)

        self.launch(lambda: held.__setitem__(at, given))

    def _launch_triton(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Stand-in for `triton.runtime.jit.JITFunction.run`."""
        name = kernel.fn.__name__
        named = dict(zip((parameter.name for parameter in kernel.params), args, strict=False)) | kwargs
        for key, value in named.items():
            if isinstance(value, Tensor) and not isinstance(value, SimulatedTensor):
                if not self.is_pinned(value):
                    raise RefusedError(f"{name}: {key} is not on the GPU")
                self._read_pinned(value)
        held = {key: _held(value) for key, value in named.items()}

        self.launch(lambda: FORMULAS[name](held))

    def _read_pinned(self, x: Tensor) -> None:
        """Let a kernel read a tensor in pinned memory of the host, at any time before the host waits for the kernel."""
        self.refuse_in_capture("a kernel with pinned memory of the host")
        self._count("pinned read")
        found, data = weakref.ref(x), x.clone()

        def arrive() -> None:
            if (source := found()) is None:
                raise RefusedError("pinned memory was freed before the kernel that reads it was done")
            if not torch.equal(source, data):
                raise RefusedError("pinned memory was changed before the kernel that reads it was done")

        self.num_copies += 1
        self._arrivals.append(arrive)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, _mapped(_indexed, args), _mapped(_indexed, kwargs or {}))

    def __enter__(self) -> Self:
        SimulatedDevice._here = self
        for owner, name, value in self._stand_ins():
            self._context.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        super().__enter__()
        self._context.enter_context(_Functions())
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.close()
        super().__exit__(*error)
        SimulatedDevice._here = None

    def _stand_ins(self) -> Iterator[tuple[Any, str, Any]]:
        @contextlib.contextmanager
        def capture(graph: _Graph, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
            self.refuse_in_capture("a capture")
            self._graph = graph
            self.counts["captures"] += 1
            try:
                yield
            finally:
                self._graph = None

        current = _Stream()
        values = {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "synchronize": lambda: self.wait("device"),
            "empty_cache": lambda: self.refuse_in_capture("empty_cache"),
            "mem_get_info": lambda device=None: (TOTAL_BYTES - _RESERVED_BYTES, TOTAL_BYTES),
            "memory_reserved": lambda: _RESERVED_BYTES,
            "max_memory_allocated": lambda: _RESERVED_BYTES,
            "reset_peak_memory_stats": lambda: None,
            "get_device_capability": lambda device=None: self._capability,
            "get_device_name": lambda device=None: "simulated device",
            "is_bf16_supported": lambda: True,
            "Stream": _Stream,
            "Event": _Event,
            "CUDAGraph": _Graph,
            "graph": capture,
            "stream": lambda stream: contextlib.nullcontext(),
            "current_stream": lambda: current,
        }
        for name, value in values.items():
            yield torch.cuda, name, value
        # Tensors with a Python dispatch have no version counters in inference mode.
        yield torch.inference_mode, "__enter__", _enter_no_grad
        yield torch.inference_mode, "__exit__", _exit_no_grad
        with contextlib.suppress(ImportError):
            from triton.runtime.jit import JITFunction

            yield JITFunction, "run", lambda kernel, *args, **kwargs: self._launch_triton(kernel, *args, **kwargs)


# Files of the product, without the helper that copies for all of them.
_PRODUCT = re.compile(r"/(model|service)/(?!.*device_copy)")


def _mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to all leaves of nested tuples, lists and dictionaries."""
    if isinstance(x, (tuple, list)):
        return type(x)([_mapped(function, each) for each in x])
    if isinstance(x, dict):
        return {key: _mapped(function, each) for key, each in x.items()}
    return function(x)


def _leaves(x: Any) -> list[Any]:
    found: list[Any] = []
    _mapped(found.append, x)
    return found


def _enter_no_grad(self: Any) -> None:
    self.no_grad = torch.no_grad()
    self.no_grad.__enter__()


def _exit_no_grad(self: Any, *error: Any) -> None:
    self.no_grad.__exit__(*error)


def _indexed(x: Any, name: str = "") -> Any:
    if name == "device" and isinstance(x, str):
        x = torch.device(x)
    return CUDA if isinstance(x, torch.device) and x.type == "cuda" else x


def _held(x: Any) -> Any:
    return x.held if isinstance(x, SimulatedTensor) else x


def _poison(x: Tensor) -> None:
    """Fill a result that is not computed yet: with NaN, or with 1 if it may be an index, which must exist."""
    x.fill_(float("nan") if x.dtype.is_floating_point else 1)
