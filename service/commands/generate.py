"""`kvasir generate`."""

import secrets
import sys
import time
from collections.abc import Sequence

from model.manifest import CheckpointError, read_manifest
from model.sampling_params import SamplingParams
from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import Tokenizer, TokenizerError
from service.engine_builder import build_engine
from service.messages import Finish, Submit
from service.settings import GenerateSettings, SettingsError, read_settings

_SUMMARY = "Continue a text: the completion goes to stdout as it is made, its figures to stderr."


def main(argv: Sequence[str]) -> int:
    """Print the completion of `--prompt`."""
    try:
        settings = read_settings(GenerateSettings, argv, command="generate", summary=_SUMMARY)
        manifest = read_manifest(settings.checkpoint)
        manifest.verify()
        tokenizer = load_tokenizer(manifest.directory)
        submit = _submit(settings, tokenizer)
        room = manifest.config.max_context_length - len(submit.prompt_token_ids)
        if submit.params.max_tokens > room:
            raise SettingsError(
                f"--max-tokens {submit.params.max_tokens} and a prompt of {len(submit.prompt_token_ids)} tokens "
                f"are over the context of {manifest.config.max_context_length}"
            )
        engine, facts = build_engine(settings, manifest)
    except SettingsError as error:
        print(f"kvasir generate: {error}", file=sys.stderr)
        return 2
    except (CheckpointError, TokenizerError, ValueError, RuntimeError) as error:
        print(f"kvasir generate: {error}", file=sys.stderr)
        return 1
    begun = time.monotonic()
    engine.submit(submit)
    finish = None
    while finish is None:
        for delta in engine.step().events:
            print(delta.text, end="", flush=True)
            finish = delta.finish
    print()
    print(f"[{facts}]\n[{_figures(finish, submit, time.monotonic() - begun)}]", file=sys.stderr)
    return 0


def _submit(settings: GenerateSettings, tokenizer: Tokenizer) -> Submit:
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    params = SamplingParams(
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        seed=secrets.randbits(64) if settings.seed is None else settings.seed,
        stop=() if settings.stop is None else (settings.stop,),
    )
    return Submit(
        uid="generate",
        attempt=0,
        prompt_token_ids=(*begin, *tokenizer.encode(settings.prompt)),
        prior_token_ids=(),
        params=params,
        arrival_seconds=time.monotonic(),
        deadline_seconds=None,
    )


def _figures(finish: Finish, submit: Submit, seconds: float) -> str:
    rate = max(0, finish.num_completion_tokens - 1) / finish.decode_seconds if finish.decode_seconds > 0 else 0.0
    return (
        f"{finish.num_prompt_tokens} prompt tokens, {finish.num_completion_tokens} completion tokens "
        f"({finish.reason}), seed {submit.params.seed}, prefill {finish.prefill_seconds * 1000:.0f} ms, "
        f"decode {rate:.0f} tokens/s, {seconds:.2f} s in all"
    )
