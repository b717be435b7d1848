"""Known escapes from Jinja's sandbox, alone and in combination: all are blocked."""

import functools
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.chat.template_sandbox import TemplateFailure, compile_template, render

BASES = (
    *("''", "()", "[]", "{}", "1", "messages", "messages[0]", "messages[0].content", "raise_exception", "strftime_now"),
    *("cycler", "joiner", "lipsum", "range(2)", "namespace", "namespace()", "dict", "self", "loop", "cycler('a')"),
    *("messages.append", "messages[0].items", "''.format", "''.format_map", "''.join", "(messages | map('upper'))"),
)
NAMES = (
    *("__class__", "__init__", "__globals__", "__builtins__", "__subclasses__", "__mro__", "__base__", "__dict__"),
    *("__code__", "__self__", "__func__", "__module__", "__import__", "__getattribute__", "__reduce_ex__", "gi_frame"),
    *("gi_code", "f_globals", "tb_frame", "ag_frame", "cr_frame", "func_globals", "im_func", "mro"),
)
STEPS = (
    *(
        "({0}).{1}",
        "({0})['{1}']",
        "({0}) | attr('{1}')",
        "({0}) | attr('\\x5f\\x5f' ~ '{1}'.strip('_') ~ '\\x5f\\x5f')",
    ),
    *("({0})['{1}'[:4] ~ '{1}'[4:]]", "[{0}] | map(attribute='{1}') | first", "[{0}] | map('attr', '{1}') | first"),
    *("[{0}] | groupby('{1}') | first", "[{0}] | selectattr('{1}') | first", "[{0}] | sum(attribute='{1}', start='')"),
    *("'{{0.{1}}}'.format({0})", "'{{0.{1}}}' | attr('format')({0})", "'{{a.{1}}}'.format_map({{'a': {0}}})"),
    *(
        "['{{0.{1}}}'] | map('format', {0}) | first",
        "('{{0.{1}}}'.format)({0})",
        "('{{a.{1}}}' | string).format(a={0})",
    ),
    *("({0}).{1}()", "(({0}) | attr('{1}'))(0)", "({0}) | map(attribute='{1}') | list | first", "dict(a={0}).a.{1}"),
)
# Strings that would appear in the output of an escape.
OUTSIDE = (
    "<class",
    "<module",
    "<frame",
    "<code",
    "<slot",
    "wrapper",
    "__name__",
    "builtin",
    "subclass",
    "jinja2",
    "root:",
)


@functools.cache
def shown(expression: str) -> str:
    """Return the output of a template that shows the expression; empty if the template is rejected."""
    source = "{% for i in [1] %}{{ " + expression + " }}{% endfor %}"
    try:
        template = compile_template(source)
        return render(template, {"messages": [{"role": "user", "content": "hi"}]}, max_characters=100_000)
    except TemplateFailure:
        return ""


def check(expression: str, base: str) -> None:
    """Check that the expression's output has only the output of `base` and tested names, and no Python object."""
    text, own = (re.sub(" at 0x[0-9a-f]+", "", shown(each)) for each in (expression, base))
    for known in (own, *NAMES):
        text = text.replace(known, "") if known else text
    assert not any(word in text for word in OUTSIDE), (expression, text)


@pytest.mark.parametrize("base", BASES)
def test_no_attribute_of_a_template_variable_leaves_the_sandbox(base: str) -> None:
    for step, name in itertools.product(STEPS, NAMES):
        check(step.format(base, name), base)


@settings(deadline=None, derandomize=True, max_examples=400)
@given(
    base=st.sampled_from(BASES),
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from(NAMES)), min_size=2, max_size=5),
)
def test_no_chain_of_attributes_leaves_the_sandbox(base: str, steps: list[tuple[str, str]]) -> None:
    expression = base
    for step, name in steps:
        expression = step.format(expression, name)
    check(expression, base)


@pytest.mark.parametrize(
    "expression",
    [
        "lipsum.__globals__['os'].popen('id').read()",
        "cycler.__init__.__globals__.os.popen('id').read()",
        "joiner.__init__.__globals__.__builtins__.open('/etc/passwd').read()",
        "''.__class__.__mro__[1].__subclasses__()",
        "self._TemplateReference__context",
        "self.__init__.__globals__",
        "(''|attr('format_map'))({'a': messages}.__class__)",
        "'{0.__class__.__init__.__globals__}' | format(messages)",
        "'%s' | format(messages.__class__)",
        "messages | map('attr', '__class__') | map('attr', '__mro__') | list",
        "messages | tojson(indent=messages.__class__)",
        "messages | xmlattr",
        "{'__class__': 1} | xmlattr",
        "{'a onload=x': 1} | xmlattr",
        "messages.__getitem__.__self__.__class__",
        "(messages | groupby('role'))[0].__class__",
        "(messages | groupby('role'))[0]._asdict.__globals__",
        "namespace(a=1)._Namespace__attrs",
        "namespace.__init__.__globals__",
        "raise_exception(messages.__class__)",
        "strftime_now('%Y').__class__",
        "loop._iterator.__class__",
        "loop.__init__.__globals__",
        "caller.__globals__",
        "range.__self__",
        "(1).__class__.__base__",
        "dict['a'].mro()",
        "dict['a'].mro()[1]",
    ],
)
def test_known_escapes_from_the_template_sandbox_are_rejected(expression: str) -> None:
    check(expression, "''")
