"""Hugging Face checkpoints with chat templates, and the prompts and completions of transformers for them."""

import json
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from tokenizers import AddedToken, Tokenizer

from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import StreamDecoder
from tests.families.models import CASES
from tests.families.tokenizer_files import write_byte_level, write_sentence_piece
from tests.model.chat_templates import CHATML, LLAMA_2

CONTEXT = 256
VOCAB_SIZE = 600
CHATML_MARKS = ("<|im_start|>", "<|im_end|>")
GENERATION = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.9,
    "max_new_tokens": 24,
    "no_repeat_ngram_size": 3,  # not supported: the service logs a warning
}


def save_chatml(directory: Path, **generation: Any) -> Path:
    """Save a Qwen2 with a byte-level tokenizer and a ChatML template in tokenizer_config.json. Return the directory."""
    tokenizer = write_byte_level(directory, VOCAB_SIZE - len(CHATML_MARKS))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in CHATML_MARKS])
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML}
    return _save(directory, "qwen2", tokenizer, config, ends=("<|im_end|>", "<|endoftext|>"), generation=generation)


def save_llama_2(directory: Path) -> Path:
    """Save a Llama with a SentencePiece-style tokenizer, and Llama 2's template in chat_template.jinja."""
    tokenizer = write_sentence_piece(directory, VOCAB_SIZE)
    (directory / "chat_template.jinja").write_text(LLAMA_2)
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    return _save(directory, "llama gqa tied", tokenizer, config, ends=("</s>",), generation={})


def _save(
    directory: Path,
    case: str,
    tokenizer: Tokenizer,
    config: dict[str, Any],
    *,
    ends: tuple[str, ...],
    generation: dict[str, Any],
) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(values))
    model = CASES[case].build(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=CONTEXT)
    model.save_pretrained(directory)
    ids = [tokenizer.token_to_id(end) for end in ends]
    written = {"eos_token_id": ids if len(ids) > 1 else ids[0], **generation}
    (directory / "generation_config.json").write_text(json.dumps(written))
    return directory


class Library:
    """Checkpoint loaded by transformers: the expected prompts and completions."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self._decoder = StreamDecoder(load_tokenizer(directory))
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def prompt(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Return the token ids of a conversation, by the chat template."""
        options = {"add_generation_prompt": True, **options}
        ids = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        return cast(list[int], ids)

    def answer(self, messages: list[dict[str, Any]], max_tokens: int) -> str:
        """Return a conversation's greedy completion without special tokens, decoded by Kvasir's `StreamDecoder`."""
        prompt = self.prompt(messages)
        config = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=max_tokens, eos_token_id=self.tokenizer.eos_token_id, pad_token_id=0
        )
        ids = self.model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()
        return self._decoder.push(ids) + self._decoder.flush()
