"""Valid inputs of each fuzz target, from which the fuzzers derive other inputs."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import save

from service.api.openapi import openapi_document
from tests.families.models import CASES
from tests.families.quantized_files import FORMS, write_form
from tests.model.gguf.files import write_with_package
from tests.model.gguf.models import write_model
from tests.model.gguf.tokenizers import byte_level, sentencepiece
from tests.model.tokenizer import makers
from tests.tiny_model import save_tiny_checkpoint


@cache
def seeds() -> dict[str, list[bytes]]:
    """Return the valid inputs by name of the target."""
    posts = [methods["post"] for methods in openapi_document()["paths"].values() if "post" in methods]
    with_body = [post["requestBody"] for post in posts if "requestBody" in post]
    contents = [body["content"]["application/json"]["examples"] for body in with_body]
    bodies = [json.dumps(example["value"]).encode() for examples in contents for example in examples.values()]
    heads = [b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body) for body in bodies[:3]]
    chunked = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n2;a=b\r\nok\r\n0\r\nc: d\r\n\r\n"
    offer = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    with TemporaryDirectory() as directory:
        checkpoint = save_tiny_checkpoint(Path(directory) / "tiny")
        own = [(checkpoint / name).read_bytes() for name in ("manifest.json", "config.json", "tokenizer_spec.json")]
        byte_level_bpe = byte_level(makers.gpt2(), "gpt-2", eos_token_id=0)
        path = write_model(Path(directory) / "x.gguf", CASES["llama llama3"].build(), changes=byte_level_bpe)
        sentencepiece_bpe = sentencepiece(makers.llama2(), chat_template="{{ messages }}")
        files = [path.read_bytes(), write_with_package(path, sentencepiece_bpe, {}).read_bytes()]
        files += [
            write_model(path, CASES[case].build(**sizes), type_name=kind, changes=byte_level_bpe).read_bytes()
            for case, sizes, kind in (("gemma4", {}, "F32"), ("qwen3", {"hidden_size": 64}, "Q4_0"))
        ]
        configs = [case.build().config.to_json_string().encode() for case in CASES.values()]
        write_form(Path(directory) / "quantized", FORMS["gptq 128"])
        quantized = json.loads((Path(directory) / "quantized" / "config.json").read_text())
        configs += [json.dumps(quantized | {"quantization_config": form.config}).encode() for form in FORMS.values()]
    tokenizers = [make().to_str().encode() for name, make in makers.MAKERS.items() if name in ("gpt2", "llama2")]
    return {
        "request": bodies,
        "http": [*heads, chunked, offer, heads[0] * 3],
        "config": configs,
        "header": [save({"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.int64)}), save({})],
        "gguf": files,
        "tokenizer": tokenizers,
        "native": own,
        "ids": [bytes(range(64)), b"\xf0\x9f\x98\x80" * 4],
    }
