"""Fuzz targets: each function passes bytes to a parser, and raises if a required property does not hold."""

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Final

import torch
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from model.attention.backends import ATTENTION_BACKENDS
from model.chat.template import load_chat_template
from model.checkpoint.loading import load_model
from model.checkpoint.manifest import CONFIG_FILE, MANIFEST_FILE, read_manifest
from model.gguf.container import read_gguf
from model.io.files import CheckpointError
from model.io.safetensors_header import read_headers
from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import StreamDecoder
from service.protocol.chat import ChatCompletionRequest, TokenizeRequest
from service.protocol.completions import CompletionRequest, DetokenizeRequest
from service.protocol.embeddings import EmbeddingRequest
from service.protocol.errors import InvalidRequest
from service.protocol.messages import MessagesRequest
from service.protocol.scores import RerankRequest, ScoreRequest
from tests.service.wire import connect
from tests.tiny_model import tiny_tokenizer

_ANSWER: Final = re.compile(rb"HTTP/1\.1 (200|4\d\d) [ -~]+\r\n(?:[a-z-]+: [ -~]*\r\n)+\r\n")
_TOKENIZER: Final = tiny_tokenizer()


def request(data: bytes) -> None:
    """A request body is parsed, or rejected with a short message."""
    for kind in (
        *(CompletionRequest, ChatCompletionRequest, EmbeddingRequest, ScoreRequest, RerankRequest),
        *(TokenizeRequest, DetokenizeRequest, MessagesRequest),
    ):
        try:
            parsed = kind.parse(data)
            if isinstance(parsed, MessagesRequest):
                parsed.chat()
        except InvalidRequest as error:
            _is_short(error)


def _is_short(error: InvalidRequest) -> None:
    assert 0 < len(error.message) < 500, error.message
    assert error.param is None or len(error.param) < 300, error.param


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    body, is_more = b"", True
    while is_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, is_more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def http(data: bytes) -> None:
    """A connection that receives these bytes sends a well-formed response, or waits for more bytes."""

    async def talk() -> bytes:
        state = ServerState()
        protocol, wire = connect(_echo, state)
        for start in range(0, len(data), 100):
            if not wire.is_closing():
                protocol.data_received(data[start : start + 100])
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        protocol.connection_lost(None)
        await asyncio.gather(*state.tasks)
        return wire.written

    written = asyncio.run(talk()).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert not written or _ANSWER.match(written), written[:300]


@cache
def _directory(name: str) -> Path:
    return Path(mkdtemp(prefix=f"kvasir-fuzz-{name}-"))


def _is_line(error: Exception) -> None:
    assert str(error)
    assert str(error).isprintable(), repr(error)
    assert len(str(error)) < 1000


def config(data: bytes) -> None:
    """A config.json of another library is read as a model config, or rejected with a one-line error."""
    directory = _directory("config")
    (directory / CONFIG_FILE).write_bytes(data)
    try:
        read_manifest(directory)
    except CheckpointError as error:
        _is_line(error)


def native(data: bytes) -> None:
    """A native checkpoint of files with these bytes is read, or rejected with a one-line error."""
    directory = _directory("native")
    for name in (MANIFEST_FILE, CONFIG_FILE, "tokenizer_spec.json"):
        (directory / name).write_bytes(data)
    for read in (lambda: read_manifest(directory).verify(), lambda: load_tokenizer(directory)):
        try:
            read()
        except CheckpointError as error:
            _is_line(error)


def header(data: bytes) -> None:
    """The tensors of a safetensors file lie inside the file, or it is rejected with a one-line error."""
    path = _directory("header") / "x.safetensors"
    path.write_bytes(data)
    try:
        for tensor in read_headers(path).values():
            assert tensor.end <= len(data)
    except CheckpointError as error:
        _is_line(error)


def gguf(data: bytes) -> None:
    """A GGUF file and its model are read, with all tensors inside the file, or rejected with a one-line error."""
    path = _directory("gguf") / "x.gguf"
    path.write_bytes(data)
    try:
        for tensor in read_gguf(path).tensors.values():
            assert tensor.end <= len(data)
    except CheckpointError as error:
        _is_line(error)

    def load() -> None:
        load_model(read_manifest(path), device="cpu", dtype=torch.float32, attention=ATTENTION_BACKENDS["sdpa"])

    for read in (load, lambda: load_tokenizer(path), lambda: load_chat_template(path)):
        try:
            read()
        except CheckpointError as error:
            _is_line(error)


def tokenizer(data: bytes) -> None:
    """A tokenizer.json of another library encodes and decodes text, or is rejected with a one-line error."""
    directory = _directory("tokenizer")
    (directory / "tokenizer.json").write_bytes(data)
    try:
        found = load_tokenizer(directory)
    except CheckpointError as error:
        _is_line(error)
    else:
        found.decode(found.encode("a story 😀"))


def ids(data: bytes) -> None:
    """Token ids stream as the text of their bytes, in whole characters, and any text survives encoding and decoding."""
    decoder = StreamDecoder(_TOKENIZER)
    token_ids = [byte % _TOKENIZER.vocab_size for byte in data]
    pieces = [*(decoder.push([token_id]) for token_id in token_ids), decoder.flush()]
    plain = b"".join(map(_TOKENIZER.token_bytes, token_ids)).decode("utf-8", "replace")
    assert "".join(pieces) == plain
    text = data.decode("utf-8", "replace")
    assert _TOKENIZER.decode(_TOKENIZER.encode(text)) == text


TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = {
    target.__name__: target for target in (request, http, config, native, header, gguf, tokenizer, ids)
}
