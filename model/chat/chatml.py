"""ChatML, the conversation format of Kvasir's models: special tokens around each message, and the chat template.

    <|endoftext|><|im_start|>system
    Tools:
    calculator(expression): Calculate a sum.<|im_end|>
    <|im_start|>user
    What is 12 * 7?<|im_end|>
    <|im_start|>assistant
    <tool_call>
    {"name": "calculator", "arguments": {"expression": "12 * 7"}}
    </tool_call><|im_end|>
    <|im_start|>tool
    84<|im_end|>
    <|im_start|>assistant
    12 times 7 is 84.<|im_end|>

Message contents are not changed. Tools follow the system message's content, with the names of their arguments only: the
JSON Schemas of two tools would fill a fifth of a context of 1,024 tokens. `<|im_end|>` must be an EOS token of the
tokenizer, to end a response. Torch-free.
"""

from collections.abc import Collection

START = "<|im_start|>"
END = "<|im_end|>"
ROLES = ("system", "user", "assistant", "tool")

TEMPLATE = """\
{{- bos_token }}
{%- set described = [{'role': 'system', 'content': ''}] if tools and messages[0].role != 'system' else [] %}
{%- for message in described + messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('the role ' ~ message.role ~ ' is none of system, user, assistant and tool') }}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') }}
    {%- if tools and loop.first %}
        {{- ('\\n\\n' if message.content else '') ~ 'Tools:' }}
        {%- for tool in tools | map(attribute='function') %}
            {{- '\\n' ~ tool.name ~ '(' ~ ((tool.parameters or {}).properties or {}) | join(', ') ~ ')' }}
            {{- ': ' ~ tool.description if tool.description else '' }}
        {%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- ('' if loop.first else '\\n') ~ '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
        {{- call.function.arguments | tojson ~ '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def supports_chatml(special_tokens: Collection[str]) -> bool:
    """Return True if the special tokens of a tokenizer include those of ChatML."""
    return START in special_tokens and END in special_tokens
