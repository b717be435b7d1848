"""Errors for a --checkpoint that is not a checkpoint directory name the path to give instead."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from model.checkpoint.manifest import read_manifest
from model.io.files import CheckpointError


def _file(name: str) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        (directory / name).write_bytes(b"x")
        return directory / name

    return make


def _parent(directory: Path) -> Path:
    (directory / "mine").mkdir()
    (directory / "mine" / "config.json").write_text("{}")
    return directory


def _in_directory(name: str) -> Callable[[Path], Path]:
    return lambda directory: _file(name)(directory).parent


WRONG = {
    "weights": (_file("model.safetensors"), r"/model.safetensors: is a file, .*; give its directory, /"),
    "another file": (_file("README.md"), r"/README.md: is a file, but not a GGUF file; give a directory$"),
    "a pickle": (_file("pytorch_model.bin"), r"kvasir convert --pickle /.* --out NEW_DIRECTORY"),
    "nanoGPT's": (_file("ckpt.pt"), r"kvasir convert --nanogpt /.*/ckpt.pt --tokenizer FILE --out NEW_DIRECTORY"),
    "a directory of pickles": (_in_directory("pytorch_model.bin"), r"kvasir convert --pickle /.* --out"),
    "a name on a hub": (lambda _: Path("Qwen/Qwen3-0.6B"), r"Qwen/Qwen3-0.6B: no such directory or file; .*downloaded"),
    "an empty directory": (lambda directory: directory, r"neither config.json nor manifest.json"),
    "a parent": (_parent, r"not a checkpoint, but contains checkpoints; give one of them, such as /.*/mine$"),
    "a directory of GGUF files": (_in_directory("m.gguf"), r"give one of them, such as /.*/m.gguf$"),
    "another file named as GGUF": (_file("m.gguf"), r"/m.gguf: not a GGUF file.*; copy the file again$"),
    "a device": (lambda _: Path("/dev/zero"), r"/dev/zero: neither a directory nor a regular file; give a directory"),
    "weights alone": (_in_directory("model.safetensors"), r"/config.json: missing; .*download it too"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_error_names_the_argument_to_give_instead(wrong: str, tmp_path: Path) -> None:
    make, message = WRONG[wrong]
    with pytest.raises(CheckpointError) as told:
        read_manifest(make(tmp_path))
    assert re.search(message, str(told.value))
    assert "\n" not in str(told.value)
