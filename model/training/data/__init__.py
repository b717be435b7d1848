"""Training data: batches of a weighted mixture, chat data, and training of the BPE tokenizer."""
