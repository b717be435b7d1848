"""Settings from flags, variables and defaults; one-line errors."""

import math
from pathlib import Path

import pytest

from model.attention.backends import ATTENTION_BACKENDS
from model.checkpoint.manifest import read_manifest
from service.config import settings as settings_module
from service.config.client_settings import BatchSettings
from service.config.flags import is_secret, variable_of
from service.config.settings import (
    GenerateSettings,
    ServeSettings,
    SettingsError,
    TokenizeSettings,
    context_length,
    effective_values,
    find_default_checkpoint,
    read_settings,
)
from service.config.training_settings import EvalSettings, TrainSettings
from service.protocol.request_model import MAX_PROMPTS


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ServeSettings.model_fields:
        monkeypatch.delenv(f"KVASIR_{name.upper()}", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)


def read(*argv: str) -> ServeSettings:
    return read_settings(ServeSettings, argv, command="serve", summary="Serve.")


def test_a_flag_wins_over_the_environment_which_wins_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read("--checkpoint", "c").port == 8000
    monkeypatch.setenv("KVASIR_PORT", "8001")
    assert read("--checkpoint", "c").port == 8001
    assert read("--checkpoint", "c", "--port", "8002").port == 8002


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_THREADS", "")
    assert read("--checkpoint", "c").threads == "auto"


def test_every_flag_sets_its_field() -> None:
    settings = read(
        *("--checkpoint", "c", "--host", "0.0.0.0", "--port", "9000", "--device", "cpu", "--dtype", "bfloat16"),
        *("--threads", "3", "--max-num-running", "5", "--max-batched-tokens", "77", "--kv-cache-memory", "12"),
        *("--kv-cache-dtype", "float16", "--require-fast-path"),
        *("--block-size", "32", "--max-waiting-requests", "9", "--drain-seconds", "1.5", "--model-name", "m"),
        *("--max-connections", "20", "--client-seconds", "2.5"),
        *("--no-enable-prefix-cache", "--max-body-size", "4", "--log-level", "debug", "--attention", "eager"),
        *(
            "--max-context-length",
            "99",
            "--chat-template",
            "plain",
            "--no-generation-config",
            "--tool-format",
            "hermes",
            "--no-parse-special",
        ),
        *("--max-waiting-tokens", "11", "--api-keys-file", "k", "--no-open-probes", "--no-open-metrics"),
        *("--cors-origins", "https://a.b", "--model-alias", "x:1", "--model-alias", "y,z", "--max-prompts", "7"),
        "--share-prefix-cache",
        *("--score-method", "yes-no", "--rerank-template", "none", "--reasoning-format", "none"),
        *("--embedding-pooling", "last", "--speculative-tokens", "8", "--prompt-slowdown", "inf"),
        *("--target-itl-ms", "40"),
        *("--target-queue-seconds", "0.25", "--max-queue-seconds", "9.5", "--resume-seconds", "3"),
        *("--response-store-size", "3", "--response-store-seconds", "60"),
        *("--no-standby", "--hang-seconds", "9.5", "--quantize", "int8", "--cache-dir", "k/c"),
        *("--no-cuda-graphs", "--no-lookahead", "--gpu-memory-share", "0.5"),
        *("--log-format", "json", "--log-prompts", "--otlp-endpoint", "http://127.0.0.1:4318"),
        *("--kv-events-endpoint", "tcp://*:5557", "--kv-events-replay-endpoint", "tcp://*:5558"),
        *("--kv-events-topic", "kv@here"),
        *("--strict-config", "--lora", "mine=adapter", "--lora-dir", "tests", "--devices", "3"),
    )
    assert settings.model_dump() == {
        "checkpoint": Path("c"),
        "device": "cpu",
        "devices": 3,
        "dtype": "bfloat16",
        "quantize": "int8",
        "attention": "eager",
        "cache_dir": Path("k/c"),
        "cuda_graphs": False,
        "lookahead": False,
        "gpu_memory_share": 0.5,
        "generation_config": False,
        "parse_special": False,
        "max_context_length": 99,
        "chat_template": "plain",
        "tool_format": "hermes",
        "reasoning_format": "none",
        "max_inspect_tokens": 128,
        "threads": 3,
        "require_fast_path": True,
        "max_num_running": 5,
        "max_batched_tokens": 77,
        "prompt_slowdown": math.inf,
        "target_itl_ms": 40.0,
        "block_size": 32,
        "kv_cache_memory": 12 * 2**20,
        "kv_cache_dtype": "float16",
        "enable_prefix_cache": False,
        "host": "0.0.0.0",
        "port": 9000,
        "model_name": "m",
        "strict_config": True,
        "lora": ("mine=adapter",),
        "lora_dir": Path("tests"),
        "max_body_size": 4 * 2**20,
        "max_connections": 20,
        "client_seconds": 2.5,
        "model_alias": ("x:1", "y", "z"),
        "api_keys_file": Path("k"),
        "api_keys": None,
        "api_key": None,
        "open_probes": False,
        "open_metrics": False,
        "share_prefix_cache": True,
        "cors_origins": ("https://a.b",),
        "max_prompts": 7,
        "speculative_tokens": 8,
        "target_queue_seconds": 0.25,
        "max_queue_seconds": 9.5,
        "embedding_pooling": "last",
        "score_method": "yes-no",
        "rerank_template": "none",
        "max_waiting_requests": 9,
        "max_waiting_tokens": 11,
        "resume_seconds": 3.0,
        "response_store_size": 3 * 2**20,
        "response_store_seconds": 60.0,
        "drain_seconds": 1.5,
        "standby": False,
        "hang_seconds": 9.5,
        "log_level": "debug",
        "log_format": "json",
        "log_prompts": True,
        "otlp_endpoint": "http://127.0.0.1:4318",
        "kv_events_endpoint": "tcp://*:5557",
        "kv_events_replay_endpoint": "tcp://*:5558",
        "kv_events_topic": "kv@here",
    }


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--checkpoint",), "--checkpoint: expected one argument"),
        (("--checkpoint", "c", "--prot", "1"), "unrecognized arguments: --prot 1; did you mean --port?"),
        (("--checkpoint", "c", "--max-num", "1"), "unrecognized arguments: --max-num 1"),
        (("--checkpoint", "c", "--port", "eight"), "--port: must be a whole number, not 'eight'"),
        (("a", "b"), "unrecognized arguments: b; see kvasir serve --help"),
        (("--checkpoint", "c", "--model-name", ""), "--model-name: must not be empty"),
        (("--checkpoint", "c", "--host", "10.0.0.1"), "--host: must be '127.0.0.1', '0.0.0.0' or '::', not '10.0.0.1'"),
        (("--checkpoint", "c", "--port", "80"), "--port: must be greater than or equal to 1024, not '80'"),
        (
            ("--checkpoint", "c", "--device", "tpu"),
            "--device: must be auto, cpu, cuda, or one of several GPUs, such as cuda:1",
        ),
        (("--checkpoint", "c", "--threads", "0"), "--threads: must be auto or at least 1, not '0'"),
        (
            ("--checkpoint", "c", "--kv-cache-memory", "big"),
            "--kv-cache-memory: must be auto, or a size such as 512MiB, 2GiB or 1.5G, not 'big'",
        ),
        (
            ("--checkpoint", "c", "--kv-cache-memory", "0"),
            "--kv-cache-memory: must be auto, or a size of at least 1 byte, such as",
        ),
        (
            ("--checkpoint", "c", "--max-body-size", "-1"),
            "--max-body-size: must be a size such as 512MiB, 2GiB or 1.5G",
        ),
        (
            ("--checkpoint", "c", "--max-body-size", "2G"),
            "--max-body-size: must be a body size from 1KiB to 1GiB, such as 2MiB",
        ),
        (("--checkpoint", "c", "--max-body-size", "0"), "--max-body-size: must be a size of at least 1 byte"),
        (("--checkpoint", "c", "--drain-seconds", "-1"), "--drain-seconds: must be greater than or equal to 0"),
        (("--checkpoint", "c", "--max-batched-tokens", "8"), "--max-batched-tokens 8 is under --max-num-running 64"),
        (("--checkpoint", "c", "--log-prompts"), "--log-prompts needs --log-format json"),
        (
            ("--checkpoint", "c", "--kv-events-replay-endpoint", "tcp://*:5558"),
            "--kv-events-replay-endpoint needs --kv-events-endpoint",
        ),
        (
            ("--checkpoint", "c", "--kv-events-endpoint", "tcp://*:99999"),
            "--kv-events-endpoint: must be a ZeroMQ address such as tcp://*:5557, with a port from 1 to 65535",
        ),
        (("--checkpoint", "c", "--otlp-endpoint", "localhost:4318"), "--otlp-endpoint: must be a URL such as http://"),
        (("--checkpoint", "c", "--otlp-endpoint", "http://user:key@a"), "set OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_an_invalid_setting_is_named_in_one_line(argv: tuple[str, ...], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(*argv)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def create_shipped_model(root: Path) -> Path:
    """Create the shipped model's directory, with an empty manifest, below `root`, and return its path."""
    directory = root / "checkpoints" / "kvasir-20m"
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_text("{}")
    return directory


def test_without_a_checkpoint_the_shipped_model_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The working directory comes first, then the package; a flag or a variable takes precedence."""
    here, package = tmp_path / "here", tmp_path / "package"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr("service.config.settings._PACKAGE_ROOT", package)
    with pytest.raises(SettingsError, match=r"^--checkpoint is needed \(or KVASIR_CHECKPOINT\)$"):
        read()
    beside = create_shipped_model(package)
    assert read().checkpoint == beside
    said = "kvasir serve: no --checkpoint given; using the shipped model, "
    assert capsys.readouterr().err == f"{said}{beside}\n"
    create_shipped_model(here)
    assert read().checkpoint == Path("checkpoints/kvasir-20m")
    assert capsys.readouterr().err == f"{said}checkpoints/kvasir-20m\n"
    tokenize = read_settings(TokenizeSettings, ["--text", "x"], command="tokenize", summary="")
    assert tokenize.checkpoint == Path("checkpoints/kvasir-20m")
    capsys.readouterr()
    with pytest.raises(SettingsError, match="--port: must be"):
        read("--port", "1")
    assert read("--checkpoint", "c").checkpoint == Path("c")
    monkeypatch.setenv("KVASIR_CHECKPOINT", "v")
    assert read().checkpoint == Path("v")
    assert capsys.readouterr().err == ""


def test_the_shipped_model_is_beside_an_editable_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = find_default_checkpoint()
    assert found is not None
    assert read_manifest(found).name == "kvasir-20m"


def test_an_empty_value_is_not_quoted() -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings(GenerateSettings, ["--checkpoint", "c", "--prompt", ""], command="generate", summary="")
    assert str(caught.value) == "--prompt: must not be empty"


def test_localhost_is_read_as_127_0_0_1(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read("--checkpoint", "c", "--host", "localhost").host == "127.0.0.1"
    monkeypatch.setenv("KVASIR_HOST", "localhost")
    assert read("--checkpoint", "c").host == "127.0.0.1"


@pytest.mark.parametrize(
    "origin", ["page.example", "https://a.b/c", "https://a b", "*,https://a.b", "null", "https://*.b"]
)
def test_cors_origins_are_normalized_to_the_form_that_browsers_send(origin: str) -> None:
    with pytest.raises(SettingsError, match=r"^--cors-origins: must be "):
        read("--checkpoint", "c", "--cors-origins", origin)
    assert read("--checkpoint", "c", "--cors-origins", "https://A.b:8/").cors_origins == ("https://a.b:8",)


def test_the_limit_of_prompts_equals_the_protocols_limit() -> None:
    (bound,) = [rule.le for rule in ServeSettings.model_fields["max_prompts"].metadata if hasattr(rule, "le")]
    assert bound == ServeSettings.model_fields["max_prompts"].default == MAX_PROMPTS


def test_a_bad_variable_is_named_as_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_PORT", "tcp://10.0.0.1:80")
    with pytest.raises(SettingsError, match="KVASIR_PORT: must be a whole number"):
        read("--checkpoint", "c")


def test_the_standard_variable_sets_the_collector_of_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://standard:4318")
    assert read("--checkpoint", "c").otlp_endpoint == "http://standard:4318"
    monkeypatch.setenv("KVASIR_OTLP_ENDPOINT", "http://ours:4318")
    assert read("--checkpoint", "c").otlp_endpoint == "http://ours:4318"
    assert read("--checkpoint", "c", "--otlp-endpoint", "http://flag:4318").otlp_endpoint == "http://flag:4318"


def test_an_unknown_variable_causes_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVASIR_PROT", "1")
    monkeypatch.setenv("KVASIR_TEMPERATURE", "1")  # a setting of another command
    read("--checkpoint", "c")
    assert (
        capsys.readouterr().err == "kvasir serve: warning: environment variable KVASIR_PROT is not a setting; ignored\n"
    )


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        read("--checkpoint", "c").port = 1


def test_the_help_shows_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in ServeSettings.model_fields.items():
        assert (variable_of(name) if is_secret(ServeSettings, name) else f"--{name.replace('_', '-')}") in text
        if not field.is_required() and field.default is not False and field.default not in (None, ()):
            assert f"(default: {field.default})" in text
    assert "(default: checkpoints/kvasir-20m in the working directory, else beside the package)" in text
    assert "(required)" not in text
    for title in ("model:", "engine:", "http:", "access:", "admission:", "operation:"):
        assert title in text


def test_effective_values_have_a_line_each() -> None:
    lines = list(effective_values(read("--checkpoint", "c", "--port", "9000"), {"threads": 7, "end_of_text": "</s>"}))
    assert len(lines) == len(ServeSettings.model_fields) + 1
    for words in (["port", "9000"], ["threads", "7"], ["end_of_text", "</s>"]):
        assert [line.split() for line in lines].count(words) == 1


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("6M", 6_000_000),
        ("512MB", 512_000_000),
        ("1.5g", 1_500_000_000),
        ("512Mi", 512 * 2**20),
        ("2GiB", 2**31),
        (" 2 gib ", 2**31),
        ("70000b", 70_000),
        ("64K", 64_000),
        ("12", 12 * 2**20),
        ("0.5", 2**19),
    ],
)
def test_sizes_have_units_and_are_mebibytes_without_a_unit(
    text: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read("--checkpoint", "c", "--kv-cache-memory", text).kv_cache_memory == num_bytes
    monkeypatch.setenv("KVASIR_KV_CACHE_MEMORY", text)
    assert read("--checkpoint", "c").kv_cache_memory == num_bytes


@pytest.mark.parametrize("text", ["5Q", "M", "-3", "1e3", "512Mbit", "2G!", "2 G B", "i", "inf", "9" * 5000, "٣M", ""])
def test_an_invalid_size_is_rejected(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--kv-cache-memory: must be auto, or a size such as 512MiB, 2GiB or 1.5G"):
        read("--checkpoint", "c", "--kv-cache-memory", text)


def test_the_former_name_of_a_setting_still_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The present name takes precedence over the former one, and a flag over a variable."""
    assert read("--checkpoint", "c").max_body_size == 2 * 2**20
    assert read("--checkpoint", "c", "--max-body-mb", "4").max_body_size == 4 * 2**20
    monkeypatch.setenv("KVASIR_MAX_BODY_MB", "8")
    assert read("--checkpoint", "c").max_body_size == 8 * 2**20
    assert read("--checkpoint", "c", "--max-body-size", "3MiB").max_body_size == 3 * 2**20
    monkeypatch.setenv("KVASIR_MAX_BODY_MB", "8 MB each")
    with pytest.raises(SettingsError, match=r"^KVASIR_MAX_BODY_MB: must be a size such as .*, not '8 MB each'$"):
        read("--checkpoint", "c")
    monkeypatch.setenv("KVASIR_MAX_BODY_SIZE", "512K")
    assert read("--checkpoint", "c").max_body_size == 512_000
    assert capsys.readouterr().err == ""


def test_effective_sizes_are_readable() -> None:
    lines = [line.split() for line in effective_values(read("--checkpoint", "c", "--kv-cache-memory", "2GiB"), {})]
    assert ["kv_cache_memory", "2.0GiB"] in lines
    assert ["max_body_size", "2.0MiB"] in lines


def test_the_context_length_is_at_most_the_models(tiny_checkpoint: Path) -> None:
    config = read_manifest(tiny_checkpoint).config
    for asked, length in (("auto", 256), ("256", 256), ("10", 10)):
        assert context_length(read("--checkpoint", "c", "--max-context-length", asked), config) == length
    with pytest.raises(SettingsError, match="--max-context-length 257 is over the 256 positions of the model; set"):
        context_length(read("--checkpoint", "c", "--max-context-length", "257"), config)


def test_the_help_shows_that_the_config_flag_takes_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(TrainSettings, ["--help"], command="train", summary="Train.")
    assert "--config FILE" in capsys.readouterr().out


def test_the_help_of_batch_names_the_shipped_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(BatchSettings, ["--help"], command="batch", summary="Answer.")
    assert "(default: the shipped model, without --url)" in " ".join(capsys.readouterr().out.split())


def test_the_help_of_generate_names_the_checkpoints_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(GenerateSettings, ["--help"], command="generate", summary="Generate.")
    said = capsys.readouterr().out
    for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p"):
        assert f"(default: the checkpoint's, else {GenerateSettings.model_fields[name].default})" in " ".join(
            said.split()
        )


def test_a_repeatable_flag_collects_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def texts(*argv: str) -> tuple[str, ...]:
        return read_settings(EvalSettings, ["--checkpoint", "c", *argv], command="eval", summary="Measure.").texts

    assert texts() == ()
    assert texts("--texts", "a=b", "--texts", "c=d=e") == ("a=b", "c=d=e")
    monkeypatch.setenv("KVASIR_TEXTS", "a=b:c=d")
    assert texts() == ("a=b", "c=d")
    assert texts("--texts", "e=f") == ("e=f",)
    with pytest.raises(SettingsError, match=r"must be NAME=FILE: a name .*; names must differ, not 'a, b=c'$"):
        texts("--texts", "a", "--texts", "b=c")
    for wrong in ("a", "=b", "a=", "a=b:a=c"):
        monkeypatch.setenv("KVASIR_TEXTS", wrong)
        with pytest.raises(SettingsError, match=r"^KVASIR_TEXTS: must be NAME=FILE: .*; names must differ, not '"):
            texts()


def test_the_attention_flag_accepts_every_backend() -> None:
    for kind in (ServeSettings, GenerateSettings):
        annotation = kind.model_fields["attention"].annotation
        assert set(getattr(annotation, "__args__", ())) == set(ATTENTION_BACKENDS) | {"auto", "native", "paged"}


@pytest.mark.parametrize(
    ("flags", "has_driver", "expected"),
    [
        ((), False, (64, 512)),
        ((), True, (256, 4096)),
        (("--device", "cpu"), True, (64, 512)),
        (("--device", "cuda:1"), False, (256, 4096)),
        (("--device", "cuda", "--max-num-running", "8"), False, (8, 4096)),
        (("--device", "cuda", "--max-batched-tokens", "128"), False, (128, 128)),
        (("--device", "cuda", "--max-batched-tokens", "8192"), False, (256, 8192)),
        (("--device", "cuda", "--max-batched-tokens", "32", "--max-num-running", "8"), False, (8, 32)),
    ],
)
def test_a_gpu_gets_larger_steps_unless_they_are_given(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], has_driver: bool, expected: tuple[int, int]
) -> None:
    monkeypatch.setattr(settings_module, "has_nvidia_driver", lambda: has_driver)
    found = read("--checkpoint", "c", *flags)
    assert (found.max_num_running, found.max_batched_tokens) == expected
