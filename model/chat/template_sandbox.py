"""Jinja sandbox for chat templates, with the environment of transformers' `apply_chat_template`.

A checkpoint's template is untrusted code. The sandbox denies unsafe attributes and changes of lists and mappings. The
sandbox does not limit time and memory (`'a' * 10**10`, nested loops), so the service renders in a child process with
limits of the operating system (`service.preprocess.template_process`).
"""

import json
from collections.abc import Mapping
from datetime import datetime
from types import GenericAlias
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_LONGEST_MESSAGE = 300
MAX_CHARACTERS = 2**23  # of a rendered text


class TemplateFailure(ValueError):
    """One-line error of compiling or rendering a chat template.

    by_template: the template rejects the messages, so the client must change them. False: any other failure, such as an
        exceeded limit or an error in the template. Tools or variables of the request may be its cause.
    """

    def __init__(self, message: str, *, by_template: bool = False) -> None:
        super().__init__(" ".join(message.split())[:_LONGEST_MESSAGE])
        self.by_template = by_template


class _TemplateRejection(TemplateError):
    """Error that a chat template raises by calling `raise_exception`, with the template's own message."""


class _Generation(Extension):
    """Jinja extension that renders the text inside `{% generation %}`, a statement for training, unchanged."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, extended to reject attributes of generic aliases such as `dict['a']`."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return not isinstance(obj, GenericAlias) and super().is_safe_attribute(obj, attr, value)


class _PlainNamespace(Namespace):
    """Jinja's `namespace()` that rejects names beginning with an underscore, which are Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # not `self`: a template may use the name
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def compile_template(source: str) -> Template:
    """Compile a chat template. Raises TemplateFailure for invalid Jinja."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda format: datetime.now().strftime(format),
        namespace=_PlainNamespace,
    )
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise TemplateFailure(f"line {error.lineno}: {error.message}") from None
    except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
        raise TemplateFailure(f"the template cannot be compiled: {type(error).__name__}") from None


def render(template: Template, variables: Mapping[str, Any], *, max_characters: int) -> str:
    """Return the text of a rendered chat template. Raises TemplateFailure, also for a text over `max_characters`."""
    pieces, length = [], 0
    try:
        for piece in template.generate(variables):
            length += len(piece)
            if length > max_characters:
                raise TemplateFailure(f"the rendered text is over {max_characters} characters; shorten the messages")
            pieces.append(piece)
        return "".join(pieces)
    except TemplateFailure:
        raise
    except _TemplateRejection as error:
        raise TemplateFailure(str(error), by_template=True) from None
    except SecurityError as error:
        raise TemplateFailure(f"the sandbox forbids an operation: {error}") from None
    except Exception as error:  # untrusted code may raise any type
        raise TemplateFailure(f"{type(error).__name__}: {error}") from None


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise _TemplateRejection(str(message))


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace name {name!r} begins with an underscore")
