"""Texts for comparing tokenizers: stories, and text that is hard to tokenize."""

import json
import lzma
import random
from functools import cache
from pathlib import Path

from hypothesis import strategies as st

DATA = Path(__file__).parents[2] / "data"

ADVERSARIAL = [
    "",
    " ",
    "\n",
    "👩‍👩‍👧‍👦 🇩🇪🇯🇵 👍🏽 ❤️‍🔥 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "北京欢迎你。日本語のテキスト、한국어 문장. ภาษาไทย हिन्दी العربية עברית",
    "Zażółć gęślą jaźń; e\u0301 vs é; A\u030a vs Å; q\u0307\u0323 vs q\u0323\u0307; ﬁ ﬂ ŉ ſ 'ſ 'S 'LL'Ve",
    "\u0300\u0301\u0302 leading marks, a" + "\u0300" * 40,
    "\x00\x01\x02\x1b[31m\x7f\x80\x85\x9f\u200b\u2028\u2029\ufeff\ufffd\ufffe\U0010ffff",
    "a\r\nb\r\n\r\n  c\t\t\td \u00a0\u3000\u2003 e  ",
    " " * 1000 + "x" + "\n" * 300 + "\t" * 300 + "y" + " " * 257,
    "1234567890 3.14159 ²³¼ ٣٤٥ Ⅷ 𝟘𝟙 1,000,000",
    "don't DON'T we'Ll I'M it's''s 'd'D they're'",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}  # ≈ €\n",
    "lone \ud800 surrogates \udfff\ud83d here",
    "<|endoftext|> <s> </s> <unk> <0x41> ▁ ▁▁ <pad> [INST]",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "the the the  the   the    the     the" * 5,
]


@cache
def stories() -> tuple[str, ...]:
    """Return the 292 stories in TinyStories' held-out lines."""
    lines = lzma.decompress((DATA / "tinystories_valid.jsonl.xz").read_bytes()).decode().splitlines()
    return tuple(json.loads(line)["text"] for line in lines)


@cache
def all_texts() -> tuple[str, ...]:
    """Return stories, texts that are hard to tokenize, and random characters of all Unicode (with a fixed seed)."""
    draw = random.Random(1)
    near = " \n\t\r'sSſtREVEll.,!-_09²½éßñ\u0308\u0301你好한글ॐ👩\u200d👧🇩🇪\u00a0\u3000\u0085\x1c\x00\x7fAbcDEF"
    noise = ["".join(draw.choices(near, k=draw.randrange(1, 40))) for _ in range(1500)]
    far = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    return (*stories(), *ADVERSARIAL, *noise, *("".join(draw.sample(far, 50)) for _ in range(300)))


def any_text() -> st.SearchStrategy[str]:
    """Generate any text, including lone surrogates, with many characters that split tokens."""
    characters = st.one_of(st.sampled_from(" \n\t'st▁eéa\u0301👩\u200d你1<>"), st.characters(exclude_categories=()))
    return st.text(characters, max_size=40)
