"""Facts about the served model, which the main process reads once from the checkpoint and the settings."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.chat.template import PLAIN_SOURCE, ChatTemplate, load_chat_template
from model.chat.template_sandbox import TemplateFailure
from model.checkpoint.lora_adapter import read_adapter
from model.checkpoint.manifest import Manifest
from model.io.files import CheckpointError, read_text
from model.sampling.params import SamplingParams
from model.tokenizer.bos_eos import read_tokenizer_config
from model.tokenizer.generation_config import GenerationConfig, generation_config_path
from model.tokenizer.generation_config import read_generation_config as read_file
from model.tokenizer.interface import Tokenizer
from service.config.settings import ModelSettings, ServeSettings, SettingsError, context_length
from service.preprocess.chat_format import ChatFormat, read_chat_format
from service.preprocess.rerank_prompt import RerankPrompt, read_rerank_prompt
from service.preprocess.template_process import TemplateProcess
from service.requests.adapters import ServedAdapter

# Sampling fields that a checkpoint may set defaults for.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestDefaults:
    """Defaults of request fields, from the checkpoint's generation_config.json.

    sampling: default values by the name of a `SamplingParams` field.
    max_new_tokens: default of `max_tokens`, lowered to the rest of the context; None: the file has none.
    ignored: keys of the file that Kvasir does not support, and that would change completions.
    """

    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_new_tokens: int | None = None
    ignored: tuple[str, ...] = ()

    def __str__(self) -> str:
        values = {**self.sampling, **({} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens})}
        return ", ".join(f"{name} {value:.10g}" for name, value in values.items()) or "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """Facts about the model that the API process needs. `template`: None if chat completions are switched off.

    rerank: prompt of yes-no scores; None if scores are similarities of embeddings.
    special_tokens: text by role, `bos_token`, `eos_token` or `pad_token`, for each role that the model has.
    """

    manifest: Manifest
    tokenizer: Tokenizer
    model_name: str
    max_context_length: int
    defaults: RequestDefaults
    template: ChatTemplate | None
    chat_format: ChatFormat
    special_tokens: Mapping[str, str]
    rerank: RerankPrompt | None = None
    adapters: tuple[ServedAdapter, ...] = ()

    def setting_values(self, settings: ServeSettings) -> dict[str, object]:
        """Return what the listing of settings at start-up shows of the checkpoint, by name.

        These are effective values of settings, such as those given as "auto", and the begin- and end-of-text tokens.
        """
        tokenizer = self.tokenizer
        begin = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
        begin_names, end_names = (
            ", ".join(f"{tokenizer.format_token_name(token_id)} ({token_id})" for token_id in token_ids) or "none"
            for token_ids in (begin, tokenizer.eos_token_ids)
        )
        return {
            "model_name": self.model_name,
            "max_context_length": self.max_context_length,
            "chat_template": "none" if self.template is None else self.template.origin,
            **self.chat_format.describe(),
            "score_method": "embedding" if self.rerank is None else "yes-no",
            "generation_config": str(self.defaults) if settings.generation_config else "off",
            "begin_of_text": begin_names,
            "end_of_text": end_names,
        }

    def warnings(self) -> list[str]:
        """Return warnings about keys and templates of the checkpoint that are not used."""
        messages = list(self.manifest.config_warnings)
        if ignored := ", ".join(self.defaults.ignored):
            messages.append(f"{generation_config_path(self.manifest.directory)}: unsupported keys, ignored: {ignored}")
        if self.template is not None and self.template.unused:
            messages.append(f"{self.template.origin}: the templates {', '.join(self.template.unused)} are not used")
        return messages


def read_served_model(
    settings: ServeSettings, manifest: Manifest, tokenizer: Tokenizer, adapters: tuple[ServedAdapter, ...] = ()
) -> ServedModel:
    """Read the checkpoint's chat template, special tokens and request defaults, and check that they can be used.

    Raises:
        SettingsError, CheckpointError: a setting, or a file of the checkpoint, cannot be used.
    """
    if settings.strict_config and manifest.config_warnings:
        raise SettingsError(
            f"{'; '.join(manifest.config_warnings)}; --strict-config rejects such keys; remove them, or omit the flag"
        )
    ids = {"bos_token": tokenizer.bos_token_id, "eos_token": next(iter(tokenizer.eos_token_ids), None)}
    texts = {name: tokenizer.format_token_name(token_id) for name, token_id in ids.items() if token_id is not None}
    texts |= read_tokenizer_config(manifest.directory).roles  # the files take precedence over the tokenizer
    template, chat_format = _chat(settings, tokenizer, texts)
    return ServedModel(
        manifest=manifest,
        tokenizer=tokenizer,
        model_name=manifest.name if settings.model_name is None else settings.model_name,
        max_context_length=context_length(settings, manifest.config),
        defaults=read_defaults(settings, manifest.directory),
        template=template,
        chat_format=chat_format,
        special_tokens=texts,
        rerank=read_rerank_prompt(settings, tokenizer),
        adapters=adapters,
    )


def read_adapters(settings: ServeSettings, manifest: Manifest) -> Iterator[ServedAdapter]:
    """Yield the adapters of --lora, read whole and checked.

    Raises SettingsError if an adapter has a name or alias of the base model, and CheckpointError for unusable files.
    """
    taken = (settings.model_name or manifest.name, *settings.model_alias)
    for name, _, directory in (each.partition("=") for each in settings.lora):
        if name in taken:
            raise SettingsError(f"--lora {name}={directory}: {name} is a name of the base model; choose another")
        adapter, path = read_adapter(Path(directory), manifest), Path(directory).resolve()
        yield ServedAdapter(
            name=name,
            directory=str(path),
            key=adapter.key,
            created_seconds=int(path.stat().st_mtime),
            num_bytes=adapter.num_bytes,
        )


def read_defaults(settings: ModelSettings, directory: Path) -> RequestDefaults:
    """Read the checkpoint's request defaults; none with --no-generation-config. Raises `CheckpointError` if invalid."""
    config = read_file(directory) if settings.generation_config else GenerationConfig()
    sampling = {name: value for name in _SAMPLING if (value := getattr(config, name)) is not None}
    try:
        SamplingParams(max_tokens=0, **sampling)
    except ValueError as error:
        raise CheckpointError(
            f"{generation_config_path(directory)}: {error}; correct the file, or ignore it with --no-generation-config"
        ) from None
    return RequestDefaults(sampling=sampling, max_new_tokens=config.max_new_tokens, ignored=config.ignored)


def _chat(
    settings: ServeSettings, tokenizer: Tokenizer, special_tokens: Mapping[str, str]
) -> tuple[ChatTemplate | None, ChatFormat]:
    """Return the chat template (None if switched off) and its formats of tool calls and reasoning.

    Raises CheckpointError if the template cannot be used, and SettingsError for an unknown format.
    """
    template = _template(settings, special_tokens)
    if template is None:
        return None, ChatFormat()
    try:
        with closing(TemplateProcess(template.source)) as process:
            if template.source != PLAIN_SOURCE:  # a file's template is untrusted, and may not compile
                process.render(None)
            form = read_chat_format(
                *(template, process, tokenizer),
                tool_format=settings.tool_format,
                reasoning_format=settings.reasoning_format,
            )
    except TemplateFailure as failure:
        raise CheckpointError(
            f"{template.origin}: {failure}; correct this template, or set --chat-template to plain, none or a file"
        ) from None
    return template, form


def _template(settings: ServeSettings, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """Return the chat template of --chat-template; None for "none". For "auto", the checkpoint's, else the plain one.

    Raises `CheckpointError` if the template cannot be read.
    """
    origin = settings.chat_template
    template = None
    if origin == "none":
        return None
    if origin == "auto":
        template, origin = load_chat_template(settings.checkpoint), "plain: the checkpoint has none"
    elif origin != "plain":
        if not Path(origin).is_file():
            raise CheckpointError(f"--chat-template {origin}: no such file; give auto, plain, none or a Jinja file")
        template = ChatTemplate(source=read_text(Path(origin)), origin=origin)
    template = template or ChatTemplate(source=PLAIN_SOURCE, origin=origin)
    return dataclasses.replace(template, special_tokens=special_tokens)
