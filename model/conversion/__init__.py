"""Checkpoints of one kind made into another, without ever running the code a file might hold.

pickles       torch.save's and pickle's files, read so that nothing in them is executed
nanogpt       nanoGPT's ckpt.pt as one of our checkpoints
characters    nanoGPT's meta.pkl, one token a character, as a tokenizer.json
safetensors_directory  a Hugging Face directory of pickles as one of safetensors
hugging_face  one of our checkpoints as a Hugging Face directory
whole         a new directory that is written in whole or not at all
"""
