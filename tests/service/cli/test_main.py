"""The table of commands, their errors and imports."""

import importlib.metadata
import io
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from model.tokenizer.byte_level import load_native
from service.cli.main import COMMANDS, main

SHIPPED = Path(__file__).parents[3] / "checkpoints/kvasir-20m"


def test_the_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        assert main(arguments) == 0
        text = capsys.readouterr().out
        for name, command in COMMANDS.items():
            assert f"  {name} " in text
            assert command.line in text


def test_version_flag_prints_the_installed_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvasir {importlib.metadata.version('kvasir')}\n"


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sreve"]) == 2
    error = capsys.readouterr().err
    assert "no command 'sreve'" in error
    assert error.count("\n") == 1


WITHOUT_EXTRAS = """
import json, sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {"matplotlib", "sympy", "mpmath", "networkx"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from service.cli.main import main
print(*map(main, json.loads(sys.argv[1])), file=sys.stderr)
"""


def test_only_training_needs_matplotlib_or_sympy(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """All commands run in one process, without the optional packages, as in the CPU image."""
    (tmp_path / "text").write_text("A text of one's own. " * 5_000)
    generate = ("generate", "--checkpoint", str(tiny_checkpoint), "--prompt", "Once", "--max-tokens", "2")
    inspect = ("inspect", "attention", "--checkpoint", str(tiny_checkpoint), "--prompt", "Once", "--layer", "0")
    train = ("train", "--corpus", str(tmp_path / "text"), "--out", str(tmp_path / "mine"))
    commands = (generate, (*generate, "--dtype", "bfloat16"), (*generate, "--quantize", "int8"), inspect, train)
    command = [sys.executable, "-c", WITHOUT_EXTRAS, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    *_, said, codes = done.stderr.splitlines()
    assert said == "kvasir train: needs matplotlib, which is not installed; run `pip install matplotlib`"
    assert codes == "0 0 0 0 1"


EVERY = [name.split() for name in COMMANDS]


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_command_has_a_help_page(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*words, "--help"])
    page = capsys.readouterr().out
    assert page.startswith(f"usage: kvasir {' '.join(words)} ")
    assert 80 < max(map(len, page.splitlines())) <= 100, "every help page is wrapped at the same width"


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_an_unusable_flag_is_one_line_and_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main([*words, "--nonsense"])
    except SystemExit as ended:  # of `bench` and `loadtest`, whose package has a parser of its own
        code = ended.code
    assert code == 2
    name = " ".join(words)
    said = capsys.readouterr()
    assert said.err == f"kvasir {name}: unrecognized arguments: --nonsense; see kvasir {name} --help\n"
    assert said.out == ""


def test_an_unusable_flag_is_reported_before_torch_is_imported() -> None:
    """Importing torch takes seconds."""
    code = (
        "import json, sys; from service.cli.main import main\n"
        "print([main([*words, '--nonsense']) for words in json.loads(sys.argv[1])], 'torch' in sys.modules)"
    )
    own = [words for words in EVERY if words[0] not in ("bench", "loadtest")]
    done = subprocess.run([sys.executable, "-c", code, json.dumps(own)], capture_output=True, text=True, check=True)
    assert done.stdout == f"{[2] * len(own)} False\n"


@pytest.mark.parametrize("command", ["serve", "tokenize", "inspect"])
def test_a_missing_checkpoint_is_one_line_and_exit_code_1(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path / "none")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"kvasir {command}: {tmp_path / 'none'}: no such directory")
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["serve", "tokenize", "inspect"])
def test_a_checkpoint_path_that_cannot_be_looked_up_is_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--checkpoint", "a" * 256]) == 1
    assert capsys.readouterr().err.startswith(f"kvasir {command}: {'a' * 256}: File name too long")


def test_tokenize_prints_tokens_or_ids(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", "--checkpoint", str(tiny_checkpoint), "--text", "ab😀", "--ids-only"]) == 0
    ids = [int(word) for word in capsys.readouterr().out.split()]
    assert ids[:2] == [97, 98]
    assert main(["tokenize", "--checkpoint", str(tiny_checkpoint), "--text", "ab😀"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines[:-1]] == ids
    assert lines[-1].startswith(f"{len(ids)} tokens, 6 bytes")


def test_tokenize_says_how_a_text_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", "hi"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("kvasir tokenize: hi: no such directory")
    assert error.endswith("; give a text with --text\n")


def test_tokenize_counts_the_begin_of_text_token_as_the_service_does(capsys: pytest.CaptureFixture[str]) -> None:
    """The begin-of-text token is included, except with --no-begin."""
    shipped = ["tokenize", "--checkpoint", str(SHIPPED), "--text", "The dog"]
    assert main([*shipped, "--ids-only"]) == main([*shipped, "--ids-only", "--no-begin"]) == 0
    begun, plain = (line.split() for line in capsys.readouterr().out.splitlines())
    assert begun == [str(load_native(SHIPPED).bos_token_id), *plain]
    assert main(shipped) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{len(begun)} tokens (1 is begin-of-text), 7 bytes")


def test_a_switch_that_is_off_by_default_has_no_negative_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tokenize", "--help"])
    shown = capsys.readouterr().out
    assert "--ids-only" in shown
    assert "--no-ids-only" not in shown
    assert "False" not in shown


def test_tokenize_rejects_invalid_utf8(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    assert main(["tokenize", "--checkpoint", str(tiny_checkpoint)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "usual"),
    [
        ("OMP_WAIT_POLICY", "PASSIVE"),
        ("GOMP_SPINCOUNT", "3000"),
        ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64"),
        ("LRU_CACHE_CAPACITY", "64"),
    ],
)
def test_torch_library_variables_are_set_unless_present(
    name: str, usual: str, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, wanted in ((None, usual), ("1000", "1000")):
        monkeypatch.delenv(name, raising=False)
        if given is not None:
            monkeypatch.setenv(name, given)
        assert main(["tokenize", "--checkpoint", str(tiny_checkpoint), "--text", "a"]) == 0
        assert os.environ[name] == wanted


def test_bench_is_found_by_its_entry_point_and_its_absence_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry_points = tomllib.loads((SHIPPED.parents[1] / "pyproject.toml").read_text())["project"]["entry-points"]
    found = importlib.metadata.EntryPoint("bench", entry_points["kvasir.commands"]["bench"], "kvasir.commands")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: (found,))
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--no-such-flag"])
    assert "kvasir bench" in capsys.readouterr().err
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    assert main(["bench"]) == 2
    assert "the command's package is not installed; run `make install`" in capsys.readouterr().err
