"""Memory plan for all processes of a server, made before the weights are read."""

import logging
import re
from pathlib import Path

import pytest

from service.config.settings import ModelSettings
from service.requests.adapters import loading_bytes
from service.worker import memory_plan
from service.worker.memory_plan import LoadedModel, MemoryPlan, ServerNeeds, plan_memory, step_bytes
from tests.model.configs import VARIANTS
from tests.tiny_model import tiny_config

MIB = 2**20
CONFIG = tiny_config(8192)
SETTINGS = ModelSettings(checkpoint=Path("checkpoint"), max_batched_tokens=512)
IMPORTS = 174 * MIB
WITH_STANDBY, ALONE = (ServerNeeds(standby=standby, num_blocks=0) for standby in (True, False))
MODEL = LoadedModel(CONFIG, value_bytes=4, cache_value_bytes=4, num_copies=1, max_context_length=256)


def has_memory(monkeypatch: pytest.MonkeyPatch, available: int, limit: int | None = None) -> None:
    monkeypatch.setattr(memory_plan, "available_memory_bytes", lambda: available)
    monkeypatch.setattr(memory_plan, "memory_limit_bytes", lambda: limit)
    monkeypatch.setattr(memory_plan, "own_anonymous_bytes", lambda: IMPORTS)


def least_memory(monkeypatch: pytest.MonkeyPatch, model: LoadedModel) -> int:
    """Return the additional MiB that a model needs, as given by the error message."""
    has_memory(monkeypatch, 0)
    with pytest.raises(ValueError, match="needs at least") as raised:
        plan_memory(model, SETTINGS, WITH_STANDBY)
    found = re.search(r"at least (\d+) MiB", str(raised.value))
    assert found is not None
    return int(found[1])


def test_a_standby_that_fits_is_kept(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    has_memory(monkeypatch, least_memory(monkeypatch, MODEL) * MIB + IMPORTS)
    with_standby = plan_memory(MODEL, SETTINGS, WITH_STANDBY)
    without = plan_memory(MODEL, SETTINGS, ALONE)
    assert with_standby == MemoryPlan(without.reserved_bytes + IMPORTS, has_standby=True)
    assert without.has_standby is False
    assert not caplog.records


def test_a_standby_that_does_not_fit_is_omitted_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_memory(monkeypatch, least_memory(monkeypatch, MODEL) * MIB + IMPORTS - 2 * MIB)
    with caplog.at_level(logging.WARNING):
        plan = plan_memory(MODEL, SETTINGS, WITH_STANDBY)
    assert plan == plan_memory(MODEL, SETTINGS, ALONE)
    (record,) = caplog.records
    assert re.match(r"no standby worker: memory is short by [12] MiB; ", record.message)


def test_a_memory_limit_that_is_too_small_is_rejected_with_the_needed_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, used = 512 * MIB, 240 * MIB
    needed = used // MIB + least_memory(monkeypatch, MODEL)
    has_memory(monkeypatch, 10 * MIB, limit=10 * MIB + used)
    with pytest.raises(ValueError, match=f"^the memory limit is 250 MiB and this model needs at least {needed} MiB: "):
        plan_memory(MODEL, SETTINGS, WITH_STANDBY)
    has_memory(monkeypatch, (needed - 1) * MIB - used, limit=limit)
    with pytest.raises(ValueError, match=r"raise the limit \(docker --memory, MEMORY in compose\)"):
        plan_memory(MODEL, SETTINGS, WITH_STANDBY)
    has_memory(monkeypatch, needed * MIB - used, limit=limit)
    assert plan_memory(MODEL, SETTINGS, WITH_STANDBY).has_standby is False


def test_without_a_memory_limit_the_error_names_the_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    has_memory(monkeypatch, 10 * MIB)
    with pytest.raises(ValueError, match=r"^10 MiB of memory are available and this model needs at least \d+ MiB: "):
        plan_memory(MODEL, SETTINGS, ALONE)


def test_the_adapters_of_lora_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    needed, more = least_memory(monkeypatch, MODEL) * MIB, loading_bytes([30 * MIB, 10 * MIB])
    assert more == 100 * MIB
    server = ALONE._replace(adapter_bytes=more)
    has_memory(monkeypatch, needed + more)
    reserved = plan_memory(MODEL, SETTINGS, server).reserved_bytes
    assert reserved == plan_memory(MODEL, SETTINGS, ALONE).reserved_bytes + more
    has_memory(monkeypatch, needed + more - 2 * MIB)
    message = (
        rf"needs, with 100 MiB for LoRA adapters, at least {(needed + more) // MIB} MiB: .*fewer adapters by --lora"
    )
    with pytest.raises(ValueError, match=message):
        plan_memory(MODEL, SETTINGS, server)


def test_needed_memory_grows_with_the_model_and_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CONFIG.tie_embeddings
    values = CONFIG.num_parameters + CONFIG.vocab_size * CONFIG.hidden_size
    assert MODEL.weight_bytes == 4 * values
    assert MODEL._replace(value_bytes=2).weight_bytes == 2 * values
    assert MODEL._replace(num_copies=2).weight_bytes == 4 * (values + CONFIG.num_parameters)
    assert MODEL._replace(packs_embedding=True).weight_bytes == 4 * CONFIG.num_parameters
    results = 64 * MIB
    assert step_bytes(CONFIG, 1024) - results == 2 * (step_bytes(CONFIG, 512) - results)
    # A prompt's tokens are scored with their log-probabilities: a table of float32, and before it of bfloat16.
    assert step_bytes(CONFIG, 512) > 512 * CONFIG.vocab_size * 6
    # A context over 1,024 tokens is rejected with the length that fits, not here.
    wide = MODEL._replace(cache_value_bytes=64)
    long, longer = (least_memory(monkeypatch, wide._replace(max_context_length=length)) for length in (1024, 2**20))
    assert long == longer > least_memory(monkeypatch, wide)


def test_a_second_embedding_is_counted_once_because_it_is_never_packed() -> None:
    config = VARIANTS["gemma4"]
    model = LoadedModel(config, value_bytes=4, cache_value_bytes=4, num_copies=2, max_context_length=64)
    looked_up, tied = 300 * 4 * 8, 300 * 32
    assert model.weight_bytes == 4 * (2 * (config.num_parameters - looked_up) + looked_up + tied)


def test_every_worker_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker plans for all: memory for the others' imports, weights and steps stays free."""
    one, several = (ServerNeeds(standby=True, num_blocks=0, num_workers=count) for count in (1, 3))
    has_memory(monkeypatch, 10 * 2**30)
    added = plan_memory(MODEL, SETTINGS, several).reserved_bytes - plan_memory(MODEL, SETTINGS, one).reserved_bytes
    assert added == 2 * (IMPORTS + MODEL.weight_bytes + step_bytes(CONFIG, SETTINGS.max_batched_tokens))
    has_memory(monkeypatch, 0)
    with pytest.raises(
        ValueError, match=r"3 workers with this model need at least \d+ MiB: free memory, lower --devices, "
    ):
        plan_memory(MODEL, SETTINGS, several)
