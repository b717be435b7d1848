"""Choice of the worker that computes a new request: the one with the least work left, cached prefixes considered."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import takewhile

from service.engine.scheduling.block_pool import block_hash, root_hash
from service.ipc.messages import Submit
from service.requests.engine_worker import EngineWorker

# A request goes to the worker that holds its prefix, unless that worker has this many more unfinished tokens, for each
# token of the prefix, than another. Tokens of prompts are computed many at once, and tokens of completions one by one.
_LOAD_PER_CACHED_TOKEN = 8
# Known blocks of a worker, about 200 bytes each: a million tokens in blocks of 16.
_MAX_BLOCKS = 2**16


class Dispatcher:
    """Chooses workers by their load and by the prompts that were sent to them.

    The workers' prefix caches are not asked. A worker probably holds as many of its latest prompts as its KV-cache can.

    Args:
        block_size: tokens of a block in the workers' prefix caches; None: the workers have no prefix cache.
    """

    def __init__(self, workers: Sequence[EngineWorker], block_size: int | None = None) -> None:
        self._workers = list(workers)  # the worker that was chosen last is at the end
        self._block_size = block_size
        self._load_per_block = _LOAD_PER_CACHED_TOKEN * (block_size or 0)
        # Hashes of the blocks that each worker has got, in order of their last use.
        self._blocks = {worker: OrderedDict[bytes, None]() for worker in workers}

    def choose(self, submit: Submit | None) -> EngineWorker:
        """Return the worker for a new request. Workers that restart or hang come last.

        submit: the request's first sequence; None: the request uses no prefix cache.
        """
        if len(self._workers) == 1:
            return self._workers[0]
        hashes = [] if submit is None or self._block_size is None else list(_block_hashes(submit, self._block_size))

        def cost(worker: EngineWorker) -> tuple[bool, int]:
            num_cached = sum(1 for _ in takewhile(self._blocks[worker].__contains__, hashes))
            return not worker.takes_requests, worker.num_tokens - self._load_per_block * num_cached

        chosen = min(self._workers, key=cost)
        self._workers.remove(chosen)
        self._workers.append(chosen)
        blocks = self._blocks[chosen]
        for content in reversed(hashes):  # a prefix is useless without its beginning, which is dropped last
            blocks[content] = None
            blocks.move_to_end(content)
        limit = _MAX_BLOCKS if chosen.last_ready is None else min(_MAX_BLOCKS, chosen.last_ready.num_blocks)
        while len(blocks) > limit:
            blocks.popitem(last=False)
        return chosen

    def forget(self, worker: EngineWorker) -> None:
        """Record that a worker's prefix cache is empty, since its process is new."""
        self._blocks[worker].clear()


def _block_hashes(submit: Submit, block_size: int) -> Iterator[bytes]:
    """Yield the hashes of a prompt's full blocks, as the engine's prefix cache computes them."""
    content, ids = root_hash(submit.cache_salt, submit.cache_namespace, submit.adapter), submit.prompt_token_ids
    for start in range(0, len(ids) - block_size + 1, block_size):
        content = block_hash(content, ids[start : start + block_size])
        yield content
