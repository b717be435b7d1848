"""Command `kvasir batch`: answer a file of requests in OpenAI's batch format.

https://developers.openai.com/api/docs/guides/batch describes the lines of both files. An output line is written as soon
as its response is complete, so an interrupted batch loses only the requests that ran.
"""

import fcntl
import json
import re
import signal
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from service.cli.batch_server import BatchClient, Reply, own_server
from service.config.client_settings import BatchSettings

_PATH = re.compile(r"/[!-~]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLine:
    """One line of the input file. `error`: the reason why the line is not a request; None for a request."""

    number: int
    custom_id: str | None
    url: str = ""
    body: Any = None
    error: str | None = None


def main(settings: BatchSettings) -> int:
    """Run `kvasir batch` and return the exit code: 0 if every line got a response of status 200, else 1."""
    num_lines, bad_lines = _check_ids(settings.input)
    with ExitStack() as stack:
        output = stack.enter_context(BatchOutput.open(settings.output, bad_lines))
        left = (line for line in read_batch(settings.input) if not output.has(line))
        first = next(left, None)
        if first is not None:
            url = settings.url
            if url is None:
                assert settings.checkpoint is not None
                print(f"kvasir batch: starting a server for {settings.checkpoint}", file=sys.stderr)
                url = stack.enter_context(own_server(settings.checkpoint))
            key = None if settings.api_key is None else settings.api_key.get_secret_value().strip()
            client = BatchClient(url, key, settings.max_retries)
            lines = (line for part in ((first,), left) for line in part)
            _answer(client, lines, output, concurrency=settings.concurrency, num_lines=num_lines)
    print(
        f"kvasir batch: {output.num_lines - output.num_failed} answered, {output.num_failed} failed: {settings.output}",
        file=sys.stderr,
    )
    return int(output.num_failed > 0)


def _answer(
    client: BatchClient, lines: Iterator[BatchLine], output: "BatchOutput", *, concurrency: int, num_lines: int
) -> None:
    """Send the requests, `concurrency` at a time, and write their responses in the order in which they complete."""
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TimeRemainingColumn()),
    )
    pending: dict[Future[Reply], BatchLine] = {}
    # SIGINT becomes an item, None: a KeyboardInterrupt inside `wait` or `submit` can leave a lock held for ever.
    finished: SimpleQueue[Future[Reply] | None] = SimpleQueue()

    def write_next() -> None:
        future = finished.get()
        if future is None:
            raise KeyboardInterrupt
        output.write_reply(pending.pop(future), future.result())
        progress.update(task, completed=output.num_lines)

    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("requests", total=num_lines, completed=output.num_lines)
        pool = ThreadPoolExecutor(concurrency, "kvasir-batch")
        previous_handler = signal.signal(signal.SIGINT, lambda *_: finished.put(None))
        try:
            for line in lines:
                if line.error is not None:
                    output.write_error(line)
                    progress.update(task, completed=output.num_lines)
                else:
                    future = pool.submit(client.post, line.url, line.body, uuid.uuid4().hex)
                    pending[future] = line
                    future.add_done_callback(finished.put)
                while len(pending) >= concurrency:
                    write_next()
            while pending:
                write_next()
        finally:
            client.cancel()
            pool.shutdown(cancel_futures=True)
            client.close()
            for future, line in pending.items():
                if not future.cancelled() and future.exception() is None:
                    output.write_reply(line, future.result())
            progress.update(task, completed=output.num_lines)
            signal.signal(signal.SIGINT, previous_handler)


def read_batch(path: Path) -> Iterator[BatchLine]:
    """Yield the parsed lines of an input file, except blank ones. An invalid line has an `error`.

    Raises OSError if the file cannot be read.
    """
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield _read_line(number, text)


def _read_line(number: int, text: bytes) -> BatchLine:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else error
        return BatchLine(number=number, custom_id=None, error=f"not valid JSON: {problem}; correct the line")
    custom_id = values.get("custom_id") if isinstance(values, dict) else None
    if not isinstance(custom_id, str) or not custom_id:
        return BatchLine(
            number=number, custom_id=None, error="not an object with a custom_id, a text that is not empty; add it"
        )
    url, body, reason = values.get("url"), values.get("body"), None
    if values.get("method") != "POST":
        reason = 'method must be "POST"; correct it'
    elif not isinstance(url, str) or not _PATH.fullmatch(url):
        reason = "url must be the path of a route, such as /v1/chat/completions; correct it"
    elif not isinstance(body, dict):
        reason = "body must be an object; correct it"
    elif body.get("stream"):
        reason = "body.stream is not possible in a batch; leave it out"
    return BatchLine(number=number, custom_id=custom_id, url=str(url), body=body, error=reason)


def _check_ids(path: Path) -> tuple[int, set[int]]:
    """Return the number of non-blank lines of an input file, and the numbers of its lines without a custom_id.

    Raises:
        ValueError: two lines have the same custom_id, or there is no such file.
    """
    first: dict[str, int] = {}
    num_lines, bad_lines = 0, set[int]()
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give a file of requests as INPUT")
    for line in read_batch(path):
        num_lines += 1
        if line.custom_id is None:
            bad_lines.add(line.number)
            continue
        if line.custom_id in first:
            raise ValueError(
                f"{path}: lines {first[line.custom_id]} and {line.number} have the custom_id {line.custom_id[:100]!r}; "
                "give each line its own"
            )
        first[line.custom_id] = line.number
    return num_lines, bad_lines


@dataclass(eq=False)
class BatchOutput:
    """Output file, flushed line by line. `num_lines`, `num_failed`: its lines and failed lines, of earlier runs too.

    A line failed if it has an error, or if its response's status is not 200. Both numbers leave out errors about a
    missing custom_id that has been added to the input since.
    """

    _file: BinaryIO
    _bad_now: set[int]  # numbers of the input lines without a custom_id
    num_lines: int = 0
    num_failed: int = 0
    _ids: set[str] = field(default_factory=set)
    _bad_lines: set[int] = field(default_factory=set)  # input lines without a custom_id whose error is in the file

    @classmethod
    def open(cls, path: Path, bad_lines: set[int]) -> "BatchOutput":
        """Open the batch's output file, read its lines, and cut off an incomplete last line.

        Raises:
            ValueError: another batch writes to the file, or a line was not written by `kvasir batch`.
        """
        file = path.open("a+b")
        output = cls(file, bad_lines)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"{path}: another batch writes to this file; choose another output file") from None
            file.seek(0)
            end = 0
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    file.truncate(end)
                    break
                end += len(text)
                try:
                    output._add(json.loads(text))
                except (ValueError, KeyError, TypeError):
                    raise ValueError(
                        f"{path}, line {number}: this line was not written by kvasir batch; choose another output file"
                    ) from None
        except BaseException:
            file.close()
            raise
        return output

    def __enter__(self) -> "BatchOutput":
        return self

    def __exit__(self, *details: object) -> None:
        with suppress(OSError):  # a line that could not be written
            self._file.close()

    def has(self, line: BatchLine) -> bool:
        """Return True if the file has the output of this input line, so that the line need not be sent."""
        return line.number in self._bad_lines if line.custom_id is None else line.custom_id in self._ids

    def write_reply(self, line: BatchLine, reply: Reply) -> None:
        response = {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body}
        self._write(line, response, None)

    def write_error(self, line: BatchLine) -> None:
        message = f"line {line.number}: {line.error}"
        self._write(line, None, {"code": "invalid_request", "message": message, "param": None, "line": line.number})

    def _write(self, line: BatchLine, response: dict[str, Any] | None, error: dict[str, Any] | None) -> None:
        values = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": line.custom_id,
            "response": response,
            "error": error,
        }
        try:
            self._file.write(json.dumps(values, ensure_ascii=False).encode(errors="replace") + b"\n")
            self._file.flush()
        except OSError as error:
            problem = f"{self._file.name}: {error.strerror}; make room, and run the same command to continue"
            raise ValueError(problem) from error
        self._add(values)

    def _add(self, values: dict[str, Any]) -> None:
        error = values["error"]
        if values["custom_id"] is None and error["line"] not in self._bad_now:
            return
        self.num_lines += 1
        self.num_failed += error is not None or values["response"]["status_code"] != 200
        if values["custom_id"] is None:
            self._bad_lines.add(error["line"])
        else:
            self._ids.add(values["custom_id"])
