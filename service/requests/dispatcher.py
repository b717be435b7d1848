"""Choice of the worker that computes a new request: the one with the least work left, cached prefixes considered."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from service.engine.scheduling.block_pool import block_hash, root_hash
from service.ipc.messages import Submit
from service.requests.engine_worker import EngineWorker

# A request goes to the worker that holds its prefix, unless that worker has this many more unfinished tokens, for each
# token of the prefix, than another. Tokens of prompts are computed many at once, and tokens of completions one by one.
_LOAD_PER_CACHED_TOKEN = 8
# Blocks whose workers are known, about 200 bytes each: 2 million tokens in blocks of 16.
_MAX_BLOCKS = 2**17


class Dispatcher:
    """Chooses workers by their load and by the prompts that were sent to them.

    The workers' prefix caches are not asked. A worker probably holds the prompts that it has got, the latest longest.

    Args:
        block_size: tokens of a block in the workers' prefix caches; None: the workers have no prefix cache.
    """

    def __init__(self, workers: Sequence[EngineWorker], block_size: int | None = None) -> None:
        self._workers = list(workers)  # the worker that was chosen last is at the end
        self._block_size = block_size
        self._load_per_block = _LOAD_PER_CACHED_TOKEN * (block_size or 0)
        self._holders: OrderedDict[bytes, int] = (
            OrderedDict()
        )  # bit masks of workers by block hash, last used at the end

    def choose(self, submit: Submit | None) -> EngineWorker:
        """Return the worker for a new request. Workers that restart or hang come last.

        submit: the request's first sequence; None: the request uses no prefix cache.
        """
        if len(self._workers) == 1:
            return self._workers[0]
        hashes = [] if submit is None or self._block_size is None else list(_block_hashes(submit, self._block_size))
        num_cached = self._num_cached_blocks(hashes)

        def cost(worker: EngineWorker) -> tuple[bool, int]:
            return not worker.takes_requests, worker.num_tokens - self._load_per_block * num_cached.get(worker, 0)

        chosen = min(self._workers, key=cost)
        self._workers.remove(chosen)
        self._workers.append(chosen)
        for content in hashes:
            self._holders[content] = self._holders.pop(content, 0) | 1 << chosen.index
        while len(self._holders) > _MAX_BLOCKS:
            self._holders.popitem(last=False)
        return chosen

    def forget(self, worker: EngineWorker) -> None:
        """Record that a worker's prefix cache is empty, since its process is new."""
        left = ((content, mask & ~(1 << worker.index)) for content, mask in self._holders.items())
        self._holders = OrderedDict((content, mask) for content, mask in left if mask)

    def _num_cached_blocks(self, hashes: Sequence[bytes]) -> dict[EngineWorker, int]:
        """Return how many of a prompt's first blocks each worker probably holds."""
        found: dict[EngineWorker, int] = {}
        holding = self._workers
        for number, content in enumerate(hashes, 1):
            mask = self._holders.get(content, 0)
            holding = [worker for worker in holding if mask >> worker.index & 1]
            if not holding:
                break
            found |= dict.fromkeys(holding, number)
        return found


def _block_hashes(submit: Submit, block_size: int) -> Iterator[bytes]:
    """Yield the hashes of a prompt's full blocks, as the engine's prefix cache computes them."""
    content, ids = root_hash(submit.cache_salt, submit.cache_namespace, submit.adapter), submit.prompt_token_ids
    for start in range(0, len(ids) - block_size + 1, block_size):
        content = block_hash(content, ids[start : start + block_size])
        yield content
