"""Table of tool formats, and their detection. Add a format's row before rows whose regex also matches its templates."""

from functools import partial

from model.chat.tool_formats.json_calls import JsonCalls
from model.chat.tool_formats.python_calls import PythonCalls
from model.chat.tool_formats.tool_format import ToolFormat
from model.chat.tool_formats.xml_calls import XmlCalls

DEFAULT_FORMAT = JsonCalls(
    name="hermes",  # Hermes 2 and 3, Qwen 2.5 and 3, SmolLM3, Granite 4
    template_regex="<tool_call>",
    opening="<tool_call>",
    before_name='\n{"name": "',
    after_name='", "arguments": ',
    after_arguments="}\n</tool_call>",
    separator="\n<tool_call>",
    marks=("<tool_call>", "</tool_call>"),
)

_MISTRAL_MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_DEEPSEEK_MARKS = tuple(f"<｜tool▁{mark}｜>" for mark in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
_list_of_calls = partial(
    JsonCalls, before_name='{"name": "', after_name='", "arguments": ', after_arguments="}", separator=", "
)

# In order of detection: the first format that a template uses is the template's format.
_ROWS: tuple[ToolFormat, ...] = (
    JsonCalls(
        name="deepseek_v3",  # DeepSeek V3 and R1
        template_regex="<｜tool▁sep｜>.*```json",
        opening="<｜tool▁calls▁begin｜>",
        closing="<｜tool▁calls▁end｜>",
        before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        after_name="\n```json\n",
        after_arguments="\n```<｜tool▁call▁end｜>",
        separator="\n",
        marks=_DEEPSEEK_MARKS,
    ),
    JsonCalls(
        name="deepseek_v3.1",
        template_regex="<｜tool▁sep｜>",
        opening="<｜tool▁calls▁begin｜>",
        closing="<｜tool▁calls▁end｜>",
        before_name="<｜tool▁call▁begin｜>",
        after_name="<｜tool▁sep｜>",
        after_arguments="<｜tool▁call▁end｜>",
        marks=_DEEPSEEK_MARKS,
    ),
    JsonCalls(
        name="mistral_v11",  # Mistral Small 3.1 and 3.2
        template_regex=r"\[TOOL_CALLS\].*\[CALL_ID\]",
        opening="[TOOL_CALLS]",
        before_name="",
        before_id="[CALL_ID]",
        after_name="[ARGS]",
        separator="[TOOL_CALLS]",
        marks=_MISTRAL_MARKS,
        id_length=9,
    ),
    JsonCalls(
        name="mistral_v13",  # Magistral, Devstral, Ministral 3, Mistral Large 3
        template_regex=r"\[TOOL_CALLS\].*\[ARGS\]",
        opening="[TOOL_CALLS]",
        before_name="",
        after_name="[ARGS]",
        separator="[TOOL_CALLS]",
        marks=_MISTRAL_MARKS,
        id_length=9,
    ),
    _list_of_calls(
        name="mistral_v3",  # Mistral 7B v0.3, Mixtral 8x22B
        template_regex=r"\[TOOL_CALLS\] \[",
        opening="[TOOL_CALLS] [",
        closing="]",
        marks=_MISTRAL_MARKS,
        id_length=9,
    ),
    _list_of_calls(
        name="mistral_v3_tekken",  # Mistral Nemo, Ministral 8B, Mistral Small 3
        template_regex=r"\[TOOL_CALLS\]",
        opening="[TOOL_CALLS][",
        closing="]",
        marks=_MISTRAL_MARKS,
        id_length=9,
    ),
    PythonCalls(
        name="lfm2",
        template_regex=r"<\|tool_(call|list)_start\|>",
        opening="<|tool_call_start|>[",
        closing="]<|tool_call_end|>",
        marks=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    _list_of_calls(
        name="phi4_mini",
        template_regex=r"<\|/tool(_call)?\|>",
        opening="<|tool_call|>[",
        closing="]<|/tool_call|>",
        marks=("<|tool_call|>", "<|/tool_call|>"),
    ),
    _list_of_calls(
        name="granite",  # Granite 3
        template_regex=r"<\|tool_call\|>",
        opening="<|tool_call|>[",
        closing="]",
        marks=("<|tool_call|>",),
    ),
    _list_of_calls(
        name="nemotron",  # Nemotron Nano 2, Llama Nemotron Super 1.5
        template_regex="<TOOLCALL>",
        opening="<TOOLCALL>[",
        closing="]</TOOLCALL>",
        marks=("<TOOLCALL>", "</TOOLCALL>"),
    ),
    XmlCalls(
        name="seed_oss",
        template_regex="<seed:tool_call>",
        opening="<seed:tool_call>",
        before_name="\n<function=",
        after_name=">\n",
        before_key="<parameter=",
        after_key=">",
        after_value="</parameter>\n",
        after_arguments="</function>\n</seed:tool_call>",
        separator="\n<seed:tool_call>",
        marks=("<seed:tool_call>", "</seed:tool_call>"),
    ),
    XmlCalls(
        name="qwen3_coder",
        template_regex="<tool_call>.*<function=",
        opening="<tool_call>",
        before_name="\n<function=",
        after_name=">\n",
        before_key="<parameter=",
        after_key=">\n",
        after_value="\n</parameter>\n",
        after_arguments="</function>\n</tool_call>",
        separator="\n<tool_call>",
        marks=DEFAULT_FORMAT.marks,
    ),
    XmlCalls(
        name="glm4",  # GLM 4.5 and 4.6
        template_regex="<tool_call>.*<arg_key>",
        opening="<tool_call>",
        before_name="",
        after_name="\n",
        before_key="<arg_key>",
        after_key="</arg_key>\n<arg_value>",
        after_value="</arg_value>\n",
        after_arguments="</tool_call>",
        separator="\n<tool_call>",
        marks=(*DEFAULT_FORMAT.marks, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    DEFAULT_FORMAT,
    PythonCalls(
        name="pythonic",  # Llama 3.2 and 4, when prompted for Python calls
        template_regex=r"\[func_name1\(",
        opening="[",
        closing="]",
        begins_text=True,
    ),
    JsonCalls(
        name="llama3_json",  # Llama 3.1, 3.2, 3.3 and 4
        template_regex=r"\"parameters\": (dictionary|'|\")",
        opening='{"name": "',
        before_name="",
        after_name='", "parameters": ',
        after_arguments="}",
        separator='; {"name": "',
        begins_text=True,
    ),
)
TOOL_FORMATS: dict[str, ToolFormat] = {form.name: form for form in _ROWS}


def find_tool_format(template: str) -> ToolFormat | None:
    """Return the format in which a chat template writes tool calls; None: no tool calls, or no known format."""
    if "tool" not in template:
        return None
    return next((form for form in TOOL_FORMATS.values() if form.is_used_by(template)), None)
