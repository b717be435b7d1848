"""What is served: a checkpoint's facts and what the settings make of them. Read once, in main, before a start."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.chat_template import (
    PLAIN_SOURCE,
    ChatTemplate,
    ChatTemplateError,
    load_chat_template,
    read_special_tokens,
    read_text,
)
from model.generation_config import GENERATION_CONFIG_FILE, GenerationConfig, GenerationConfigError
from model.generation_config import read_generation_config as read_file
from model.manifest import Manifest
from model.sampling_params import SamplingParams
from model.template_sandbox import TemplateFailure
from model.tokenizer.interface import Tokenizer
from service.settings import ModelSettings, ServeSettings, context_length
from service.template_process import TemplateProcess

# What a checkpoint may set of a request.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """What a request that says nothing gets, where the checkpoint says something.

    sampling: fields of `SamplingParams`.
    max_new_tokens: the most tokens of a completion, within the context.
    ignored: keys of the checkpoint's file that would change a completion and that nothing acts on.
    """

    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_new_tokens: int | None = None
    ignored: tuple[str, ...] = ()

    def __str__(self) -> str:
        told = {**self.sampling, **({} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens})}
        texts = (f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in told.items())
        return ", ".join(texts) or "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """Everything about the model that the API process needs to know.

    template: None where no conversations are served.
    marks: `bos_token`, `eos_token`, `pad_token`: their text, where the model has them.
    """

    manifest: Manifest
    tokenizer: Tokenizer
    model_name: str
    max_context_length: int
    defaults: Defaults
    template: ChatTemplate | None
    marks: Mapping[str, str]

    def found(self, settings: ServeSettings) -> dict[str, object]:
        """What the settings came to, and what the checkpoint brought, for people."""
        ends = [self.tokenizer.token_name(token_id) for token_id in self.tokenizer.eos_token_ids]
        begin = self.tokenizer.bos_token_id
        return {
            "model_name": self.model_name,
            "max_context_length": self.max_context_length,
            "chat_template": "none" if self.template is None else self.template.origin,
            "generation_config": self._defaults_in_words() if settings.generation_config else "off",
            "begin_of_text": "none" if begin is None else f"{self.tokenizer.token_name(begin)} ({begin})",
            "end_of_text": ", ".join(
                f"{name} ({i})" for name, i in zip(ends, self.tokenizer.eos_token_ids, strict=True)
            )
            or "none",
        }

    def _defaults_in_words(self) -> str:
        """The defaults; of a file that sets none, that it is there."""
        if self.defaults == Defaults() and (self.manifest.directory / GENERATION_CONFIG_FILE).exists():
            return f"none in {GENERATION_CONFIG_FILE}"
        return str(self.defaults)

    def warnings(self) -> list[str]:
        """What the checkpoint asks for and does not get."""
        told = []
        if self.defaults.ignored:
            names = ", ".join(self.defaults.ignored)
            told.append(f"{self.manifest.directory / GENERATION_CONFIG_FILE}: {names}: not supported, ignored")
        if self.template is not None and self.template.unused:
            names = ", ".join(self.template.unused)
            told.append(f"{self.template.origin}: the templates {names} are not used")
        return told


def read_serving(settings: ServeSettings, manifest: Manifest, tokenizer: Tokenizer) -> Serving:
    """Read what stands beside the weights, and check that it can be used.

    Raises:
        SettingsError: a longer context was asked for than the model has.
        ChatTemplateError, GenerationConfigError: a file cannot be used; one line says why.
    """
    marks = _marks(tokenizer, read_special_tokens(manifest.directory))
    return Serving(
        manifest=manifest,
        tokenizer=tokenizer,
        model_name=manifest.name if settings.model_name is None else settings.model_name,
        max_context_length=context_length(settings, manifest.config),
        defaults=read_defaults(settings, manifest.directory),
        template=_template(settings, marks),
        marks=marks,
    )


def read_defaults(settings: ModelSettings, directory: Path) -> Defaults:
    """The defaults of requests that the checkpoint asks for; none where the settings say so.

    Raises:
        GenerationConfigError: generation_config.json cannot be used.
    """
    config = read_file(directory) if settings.generation_config else GenerationConfig()
    sampling = {name: value for name in _SAMPLING if (value := getattr(config, name)) is not None}
    try:
        SamplingParams(max_tokens=0, **sampling)
    except ValueError as error:
        raise GenerationConfigError(
            f"{directory / GENERATION_CONFIG_FILE}: {error}; correct the file, or --no-generation-config"
        ) from None
    return Defaults(sampling=sampling, max_new_tokens=config.max_new_tokens, ignored=config.ignored)


def _marks(tokenizer: Tokenizer, told: Mapping[str, Any]) -> dict[str, str]:
    """The marks' texts by the checkpoint's files, and by its tokenizer where they are silent."""
    ids = {"bos_token": tokenizer.bos_token_id, "eos_token": next(iter(tokenizer.eos_token_ids), None)}
    own = {name: tokenizer.token_name(token_id) for name, token_id in ids.items() if token_id is not None}
    return {**own, **told}


def _template(settings: ServeSettings, marks: Mapping[str, str]) -> ChatTemplate | None:
    """The template that the setting means.

    Raises:
        ChatTemplateError: it cannot be read, or is none.
    """
    template: ChatTemplate | None
    match settings.chat_template:
        case "none":
            return None
        case "auto":
            template = load_chat_template(settings.checkpoint)
        case "plain":
            template = None
        case path:
            if not Path(path).is_file():
                raise ChatTemplateError(f"--chat-template {path}: no such file; give auto, plain, none or a Jinja file")
            template = ChatTemplate(source=read_text(Path(path)), origin=path)
    if template is None:
        told = "plain" if settings.chat_template == "plain" else "plain: the checkpoint has none"
        template = ChatTemplate(source=PLAIN_SOURCE, origin=told)
    template = dataclasses.replace(template, special_tokens=marks)
    try:
        with TemplateProcess(template.source) as process:
            process.check()
    except TemplateFailure as failure:
        raise ChatTemplateError(
            f"{template.origin}: {failure}; mend it, or --chat-template plain, none or another FILE"
        ) from None
    return template
