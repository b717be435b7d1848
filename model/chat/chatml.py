"""ChatML, the conversation format of Kvasir's models: special tokens around each message, and the chat template.

    <|endoftext|><|im_start|>user
    Who are you?<|im_end|>
    <|im_start|>assistant
    I am Kvasir.<|im_end|>

Message contents are not changed. `<|im_end|>` must be an EOS token of the tokenizer, to end a response. Torch-free.
"""

from collections.abc import Collection

START = "<|im_start|>"
END = "<|im_end|>"
ROLES = ("system", "user", "assistant")

TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('the role ' ~ message.role ~ ' is none of system, user and assistant') }}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def supports_chatml(special_tokens: Collection[str]) -> bool:
    """Return True if the special tokens of a tokenizer include those of ChatML."""
    return START in special_tokens and END in special_tokens
