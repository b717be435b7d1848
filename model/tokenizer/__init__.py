"""Text to token ids and back. Torch-free.

interface    what every tokenizer can do: the Tokenizer protocol, TokenizerError
byte_level   byte-level BPE as a tiktoken.Encoding
native       the tokenizer files of our own checkpoints
files        which files of a directory hold its tokenizer: load_tokenizer
stream       StreamDecoder: text from a stream of ids, never half a character
"""
