"""`kvasir families`, the proofs of families, and the table of parity."""

import json
from datetime import date
from pathlib import Path

import pytest

from model.gguf.architectures import GGUF_FAMILIES
from model.huggingface.families.table import FAMILIES, PROOFS_FILE
from model.io.files import read_json, write_json
from service.cli.families import family_facts
from service.cli.main import main
from tests.families.models import CASES
from tests.families.parity_table import CHECKS, outcomes, prove, table, updated
from tests.families.test_serving import SERVED
from tests.model.gguf.test_architectures import EXPRESSIBLE


def test_every_family_of_the_table_has_a_proof() -> None:
    """`make families` writes the file after a family was added."""
    proofs = read_json(PROOFS_FILE)
    assert proofs.keys() == FAMILIES.keys()
    served = {case.family for case, _ in SERVED.values()}
    for family, proof in proofs.items():
        needed = set(CHECKS) if family in served else {"logprobs"}
        assert set(proof) == needed - ({"GGUF"} if family not in GGUF_FAMILIES else set()), family


def test_families_of_gguf_files_have_a_case() -> None:
    assert {CASES[name].family for name in EXPRESSIBLE} == GGUF_FAMILIES


def test_the_command_lists_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "model_type"
    assert [line.split()[0] for line in lines] == list(FAMILIES)
    assert max(map(len, [head, *lines])) <= 100
    assert main(["families", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [family["model_type"] for family in values] == list(FAMILIES)


def test_facts_are_what_the_reader_accepts() -> None:
    llama, gpt2, mistral = (family_facts(FAMILIES[name]) for name in ("llama", "gpt2", "mistral"))
    assert llama.rope_types[:3] == ("default", "linear", "llama3")
    assert (llama.has_windows, llama.has_biases, llama.has_gguf) == (False, True, True)
    assert gpt2.rope_types == ()
    assert gpt2.activations == ("gelu", "gelu_pytorch_tanh", "gelu_new", "relu")
    assert (mistral.has_windows, mistral.has_biases) == (True, False)
    gemma, multimodal = family_facts(FAMILIES["gemma3_text"]), family_facts(FAMILIES["gemma3"])
    assert (multimodal.rope_types, multimodal.activations) == (gemma.rope_types, gemma.activations)


def test_the_table_shows_results_of_this_run_and_dates_of_others(tmp_path: Path) -> None:
    recorded: list[tuple[str, object]] = []
    prove(lambda *value: recorded.append(value), "llama", "logprobs", "greedy")
    other = [("parity", ["llama", "greedy"]), ("else", 1)]
    found = outcomes([(recorded, True), (other, False), ([("parity", ["qwen2", "logprobs"])], True)])
    assert found == {("llama", "logprobs"): True, ("llama", "greedy"): False, ("qwen2", "logprobs"): True}
    rows = {line.split()[0]: line.split()[1:] for line in list(table(found))[1:]}
    assert rows["llama"][:2] == ["passed", "FAILED"]
    assert rows["qwen2"][0] == "passed"
    assert rows["qwen2"][1] == read_json(PROOFS_FILE)["qwen2"]["greedy"]
    before = {"llama": {"greedy": "2026-01-02", "GGUF": "2026-01-02"}, "no family": {"GGUF": "2026-01-02"}}
    write_json(tmp_path / "proofs.json", updated(before, found))
    after, today = read_json(tmp_path / "proofs.json"), date.today().isoformat()
    assert after["llama"] == {"logprobs": today, "GGUF": "2026-01-02"}
    assert after.keys() == FAMILIES.keys()
