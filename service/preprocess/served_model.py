"""Served model: the checkpoint's files combined with the settings. Read once, in the main process, before start."""

import dataclasses
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.chat.template import PLAIN_SOURCE, ChatTemplate, load_chat_template
from model.chat.template_sandbox import TemplateFailure
from model.checkpoint.manifest import Manifest
from model.io.files import CheckpointError, read_text
from model.sampling.generation_config import GENERATION_CONFIG_FILE, GenerationConfig
from model.sampling.generation_config import read_generation_config as read_file
from model.sampling.params import SamplingParams
from model.tokenizer.bos_eos import read_tokenizer_config
from model.tokenizer.interface import Tokenizer
from service.config.settings import ModelSettings, ServeSettings, context_length
from service.preprocess.template_process import TemplateProcess

# Sampling fields that a checkpoint may set defaults for.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestDefaults:
    """Defaults of request fields, from the checkpoint's generation_config.json.

    sampling: fields of `SamplingParams`.
    max_new_tokens: default `max_tokens`, within the context; None if the checkpoint sets no default.
    ignored: keys of the file that would change completions and are not supported.
    """

    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_new_tokens: int | None = None
    ignored: tuple[str, ...] = ()

    def __str__(self) -> str:
        values = {**self.sampling, **({} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens})}
        texts = (
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
        )
        return ", ".join(texts) or "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """Model facts that the API process needs.

    template: chat template; None if chat is not served.
    marks: texts of the special tokens `bos_token`, `eos_token` and `pad_token`, as far as the model has them.
    """

    manifest: Manifest
    tokenizer: Tokenizer
    model_name: str
    max_context_length: int
    defaults: RequestDefaults
    template: ChatTemplate | None
    marks: Mapping[str, str]

    def found(self, settings: ServeSettings) -> dict[str, object]:
        """Return the resolved settings and facts of the checkpoint, as text for the start-up listing."""
        ends = [self.tokenizer.format_token_name(token_id) for token_id in self.tokenizer.eos_token_ids]
        begin = self.tokenizer.bos_token_id
        return {
            "model_name": self.model_name,
            "max_context_length": self.max_context_length,
            "chat_template": "none" if self.template is None else self.template.origin,
            "generation_config": str(self.defaults) if settings.generation_config else "off",
            "begin_of_text": "none" if begin is None else f"{self.tokenizer.format_token_name(begin)} ({begin})",
            "end_of_text": ", ".join(
                f"{name} ({i})" for name, i in zip(ends, self.tokenizer.eos_token_ids, strict=True)
            )
            or "none",
        }

    def warnings(self) -> list[str]:
        """Return warnings about contents of the checkpoint that are not used."""
        messages = []
        if self.defaults.ignored:
            names = ", ".join(self.defaults.ignored)
            messages.append(f"{self.manifest.directory / GENERATION_CONFIG_FILE}: {names}: not supported, ignored")
        if self.template is not None and self.template.unused:
            names = ", ".join(self.template.unused)
            messages.append(f"{self.template.origin}: the templates {names} are not used")
        return messages


def read_served_model(settings: ServeSettings, manifest: Manifest, tokenizer: Tokenizer) -> ServedModel:
    """Read and check the checkpoint's files other than the weights.

    Raises:
        SettingsError: --max-context-length is over the model's positions.
        CheckpointError: a file cannot be used. The message is one line.
    """
    ids = {"bos_token": tokenizer.bos_token_id, "eos_token": next(iter(tokenizer.eos_token_ids), None)}
    marks = {name: tokenizer.format_token_name(token_id) for name, token_id in ids.items() if token_id is not None}
    marks |= read_tokenizer_config(manifest.directory).roles  # the files take precedence over the tokenizer
    return ServedModel(
        manifest=manifest,
        tokenizer=tokenizer,
        model_name=manifest.name if settings.model_name is None else settings.model_name,
        max_context_length=context_length(settings, manifest.config),
        defaults=read_defaults(settings, manifest.directory),
        template=_template(settings, marks),
        marks=marks,
    )


def read_defaults(settings: ModelSettings, directory: Path) -> RequestDefaults:
    """Read the checkpoint's request defaults. Return empty defaults with --no-generation-config.

    Raises:
        CheckpointError: generation_config.json cannot be used.
    """
    config = read_file(directory) if settings.generation_config else GenerationConfig()
    sampling = {name: value for name in _SAMPLING if (value := getattr(config, name)) is not None}
    try:
        SamplingParams(max_tokens=0, **sampling)
    except ValueError as error:
        raise CheckpointError(
            f"{directory / GENERATION_CONFIG_FILE}: {error}; correct the file, or ignore it with --no-generation-config"
        ) from None
    return RequestDefaults(sampling=sampling, max_new_tokens=config.max_new_tokens, ignored=config.ignored)


def _template(settings: ServeSettings, marks: Mapping[str, str]) -> ChatTemplate | None:
    """Return the chat template that --chat-template selects, or None for "none".

    Raises:
        CheckpointError: the file cannot be read, or is not a valid template.
    """
    origin = settings.chat_template
    match settings.chat_template:
        case "none":
            return None
        case "auto":
            template, origin = load_chat_template(settings.checkpoint), "plain: the checkpoint has none"
        case "plain":
            template = None
        case path:
            if not Path(path).is_file():
                raise CheckpointError(f"--chat-template {path}: no such file; give auto, plain, none or a Jinja file")
            template = ChatTemplate(source=read_text(Path(path)), origin=path)
    template = dataclasses.replace(template or ChatTemplate(source=PLAIN_SOURCE, origin=origin), special_tokens=marks)
    try:
        with closing(TemplateProcess(template.source)) as process:
            process.render(None)
    except TemplateFailure as failure:
        raise CheckpointError(
            f"{template.origin}: {failure}; correct it, or choose another with --chat-template plain, none or FILE"
        ) from None
    return template
