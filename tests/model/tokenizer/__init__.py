"""Tests of `model.tokenizer`: against the `tokenizers` library, on stories and on adversarial text."""
