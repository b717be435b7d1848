"""Client of the grammar compiler process, with a cache of compiled grammars."""

import hashlib
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from model.chat.reasoning import all_marks, mark_ids
from model.structured_output.grammar import Vocabulary
from model.tokenizer.interface import Tokenizer
from service.protocol.errors import EngineFailed, InvalidRequest
from service.protocol.response_format import OutputConstraint
from service.sandbox.child_process import BoundedProcess, ProcessEnded, ProcessKilled, ProcessLimits, ProcessNotStarted
from service.sandbox.serial_executor import SerialExecutor

WAIT_SECONDS = 5.0
_MAX_REMEMBERED = 128
# A typical grammar takes about 1 ms of CPU time.
COMPILER_LIMITS: Final = ProcessLimits(cpu_seconds=2.0, memory_bytes=2**30)


class GrammarChecker:
    """Compiler of requests' output constraints to grammars, one at a time, in a child process.

    Args:
        max_waiting: maximum number of requests that wait for the child process; others are rejected.
        wait_seconds: maximum wait of a request for the child process, after which it is rejected.
        observe: called for each request with the kind of constraint, "accepted" or "refused", and the seconds of
            compilation, or None for a cached grammar.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: ProcessLimits = COMPILER_LIMITS,
        *,
        max_waiting: int = 256,
        wait_seconds: float = WAIT_SECONDS,
        observe: Callable[[str, str, float | None], None] = lambda kind, outcome, seconds: None,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._process = BoundedProcess("service.structured_output.compiler_process", limits, self._opening)
        self._executor = SerialExecutor(
            "schemas and grammars", "the grammar compiler", max_waiting=max_waiting, wait_seconds=wait_seconds
        )
        self._observe = observe
        self._answers: dict[bytes, dict[str, str]] = {}

    async def grammar(self, wanted: OutputConstraint | None) -> str | None:
        """Return the compiled grammar of a request's output constraint, or None without a constraint.

        Raises:
            InvalidRequest: the constraint cannot be enforced.
            Overloaded: too many requests wait for the child process, or the request waited too long.
            EngineFailed: the child process cannot be started, or was killed twice.
        """
        if wanted is None:
            return None
        order = {"kind": wanted.kind, "content": wanted.content, "lenient": wanted.lenient}
        key = hashlib.blake2b(json.dumps(order).encode()).digest()
        seconds: float | None = None
        if key in self._answers:
            answer = self._answers.pop(key)
        else:
            answer, seconds = await self._executor.run(partial(self._ask, order))
        self._answers[key] = answer  # the last entry is the most recently used
        if len(self._answers) > _MAX_REMEMBERED:
            del self._answers[next(iter(self._answers))]
        self._observe(wanted.kind, "refused" if "error" in answer else "accepted", seconds)
        if "error" in answer:
            raise InvalidRequest.of(wanted.param, f": this output format cannot be enforced: {answer['error']}")
        return answer["grammar"]

    def close(self) -> None:
        """End the thread and the child process."""
        self._executor.close()
        self._process.close()

    def _opening(self) -> dict[str, Any]:
        marks = mark_ids(self._tokenizer, all_marks())
        vocabulary = Vocabulary.of(self._tokenizer, marks.values())
        return {
            "tokens": [token.decode("latin-1") for token in vocabulary.tokens[: self._tokenizer.vocab_size]],
            "special_token_ids": vocabulary.special_token_ids,
            "eos_token_ids": [*self._tokenizer.eos_token_ids],
            "mark_ids": marks,
        }

    def _ask(self, order: dict[str, object]) -> tuple[dict[str, str], float]:
        start = time.monotonic()
        try:
            reply = self._process.ask(order)
        except ProcessNotStarted:
            raise EngineFailed("the grammar compiler process of this server cannot be started", retry=False) from None
        except ProcessKilled:  # not by its limits, so the grammar may be valid
            raise EngineFailed("the grammar compiler process was killed; try again later", retry=True) from None
        except ProcessEnded:
            reply = {"error": f"compilation takes over {self._limits}; simplify the schema or grammar"}
        return reply, time.monotonic() - start
