"""Command `kvasir generate`: complete a text in this process, without a server."""

import secrets
import sys
import time

from model.checkpoint.manifest import read_manifest
from model.sampling.params import SamplingParams
from model.tokenizer.generation_config import generation_config_path
from model.tokenizer.interface import Tokenizer
from service.config.settings import GenerateSettings, SettingsError, context_length
from service.engine.engine import create_submit
from service.ipc.messages import Submit
from service.preprocess.served_model import RequestDefaults, read_defaults
from service.worker.engine_factory import build_engine


def main(settings: GenerateSettings) -> int:
    """Run `kvasir generate`: print the completion of `--prompt` to stdout, and its statistics to stderr."""
    manifest = read_manifest(settings.checkpoint)
    tokenizer = manifest.verify()
    defaults = read_defaults(settings, manifest.directory)
    for warning in manifest.config_warnings:
        print(f"kvasir generate: warning: {warning}", file=sys.stderr)
    if defaults.ignored:
        file, names = generation_config_path(manifest.directory).name, ", ".join(defaults.ignored)
        print(f"kvasir generate: warning: {file}: unsupported keys, ignored: {names}", file=sys.stderr)
    submit = _submit(settings, tokenizer, defaults, context_length(settings, manifest.config))
    engine, facts = build_engine(settings, manifest, get_tokenizer=lambda: tokenizer)
    begun = time.monotonic()
    engine.submit(submit)
    finish = None
    while finish is None:
        for delta in engine.step().events:
            print(delta.text, end="", flush=True)
            finish = delta.finish
    print()
    rate = max(0, finish.num_completion_tokens - 1) / finish.decode_seconds if finish.decode_seconds > 0 else 0.0
    # Greedy sampling (temperature 0) does not use the seed, so the seed is not printed.
    seed = "" if submit.params.temperature == 0 else f", seed {submit.params.seed}"
    figures = (
        f"{finish.num_prompt_tokens} prompt tokens, {finish.num_completion_tokens} completion tokens "
        f"({finish.reason}){seed}, prefill {finish.prefill_seconds * 1000:.0f} ms, "
        f"decode {rate:.0f} tokens/s, {time.monotonic() - begun:.2f} s in total"
    )
    print(f"[{facts}]\n[{figures}]", file=sys.stderr)
    return 0


def _submit(
    settings: GenerateSettings, tokenizer: Tokenizer, defaults: RequestDefaults, max_context_length: int
) -> Submit:
    """Build the engine request. A given flag overrides the checkpoint's default, which overrides the flag's default.

    Raises SettingsError if prompt and --max-tokens exceed the context length.
    """
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    prompt_ids = (*begin, *tokenizer.encode(settings.prompt))
    room = max_context_length - len(prompt_ids)
    max_tokens = settings.max_tokens
    if defaults.max_new_tokens is not None and "max_tokens" not in settings.model_fields_set:
        max_tokens = min(defaults.max_new_tokens, max(1, room))
    if max_tokens > room:
        raise SettingsError(
            f"--max-tokens {max_tokens} and a prompt of {len(prompt_ids)} tokens exceed the context length of "
            f"{max_context_length}; lower --max-tokens or shorten the prompt"
        )
    flags = ("temperature", "top_k", "top_p", "min_p")
    sampling = {name: getattr(settings, name) for name in flags} | {
        name: value for name, value in defaults.sampling.items() if name not in settings.model_fields_set
    }
    params = SamplingParams(
        max_tokens=max_tokens,
        **sampling,
        seed=secrets.randbits(64) if settings.seed is None else settings.seed,
        stop=() if settings.stop is None else (settings.stop,),
    )
    return create_submit("generate", prompt_ids, params)
