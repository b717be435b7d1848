"""Kernels of our own take a model's place between two steps, once they are loaded and its matrices are packed for them.

Where they are there from the beginning, the first step packs, and frees each matrix as it goes. Where they had to be
compiled first, others are served meanwhile: then a thread of low priority packs, and the old matrices go at the swap;
for that while they are held twice. Either way such a thread gives them large pages when they serve.
"""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from model.freed_memory import give_back_freed_memory
from model.kernels.loading import KernelLibrary
from model.native_transformer import NativeTransformer, kernels_for
from model.transformer import Transformer

logger = logging.getLogger(__name__)

_NICENESS = 10  # a busy processor leaves it a tenth of its time


def in_thread(work: Callable[[], None]) -> None:
    """Do it beside everything else, when nothing else wants the processor."""

    def work_last() -> None:
        with suppress(OSError, AttributeError):  # a system without priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        work()

    threading.Thread(target=work_last, name="packing", daemon=True).start()


class KernelSwap:
    """Watches for the kernels that compute all of a model."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self._kernels = kernels_for(model)
        self._is_serving = self._kernels is not None and self._kernels.loaded is None
        self._is_packing = False
        self._packed: NativeTransformer | None = None

    def take(self) -> NativeTransformer | None:
        """What computes from this step on, told once; None while it is the model, or for good. Between two steps."""
        if self._kernels is None:
            return None
        if self._kernels.loaded is not None and not self._is_packing:
            library, self._is_packing = self._kernels.loaded, True
            self._model.requires_grad_(False)
            if self._is_serving:
                in_thread(lambda: self._pack(library))
            else:
                self._packed = NativeTransformer(self._model, library)
        if self._packed is None:
            return None
        kernels, self._kernels = self._kernels, None
        self._packed.free_matrices()
        if not self._is_serving:
            give_back_freed_memory()  # what they were packed from
        in_thread(self._finish)
        kernels.serve()
        return self._packed

    def _finish(self) -> None:
        """What need not be done before they serve."""
        if self._is_serving:
            give_back_freed_memory()
        if self._packed is not None:
            self._packed.enlarge_pages()

    def _pack(self, library: KernelLibrary) -> None:
        try:
            with torch.no_grad():
                self._packed = NativeTransformer(self._model, library, keeps_matrices=True)
        except (RuntimeError, MemoryError) as error:
            logger.warning("matrices cannot be packed for our own kernels, PyTorch's serve on: %s", error)
