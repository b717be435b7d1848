"""Text to token ids and back. Torch-free.

interface    what every tokenizer can do: the Tokenizer protocol, TokenizerError
stream       StreamDecoder: text from a stream of ids, never half a character
files        which files of a directory hold its tokenizer: load_tokenizer
native         those of our own checkpoints
tokenizer_json those of Hugging Face, by tiktoken where that is the same, else by the tokenizers library
openai_files   those of GPT-2 and its successors, and Llama 3's, known by their hashes
marks          which marks begin and end a text, by the neighbouring files
export       any of them as a Hugging Face directory
vocabulary   ids back to text, the same for every tokenizer
byte_level   byte-level BPE as a tiktoken.Encoding
hugging_face any other tokenizer, by the tokenizers library
merges       when a list of merges and a table of ranks are the same encoding
split_pattern  patterns that mean the same to both regular expression engines
added_tokens   tokens added by name, and how they are found in a text
alphabet       how byte-level vocabularies write bytes as characters
bounds         how much of a text one token can stand for
decoders       what the bytes of a token are
"""
