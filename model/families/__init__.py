"""Other people's checkpoints: what a Hugging Face config.json means, and which of its tensors are which of ours.

No file here imports torch. How to add a family is written in docs/families.md.

family         what a family is: Family, Names, Layout, and the tensors a checkpoint of one must hold
reader         config.json, strictly: every key is used, known to be harmless, or refused by name
rope           rotary positions in both spellings of the config
table          FAMILIES: model_type -> Family, and the error of an unknown one
directory      a directory of safetensors, one or several, found and refused
placement      which tensor of which file fills which of ours, checked before anything is loaded
export         the way back: one of our models as a Hugging Face directory
llama_like     what Llama and its descendants share: names, sizes, windows
gpt2           GPT-2: learned positions, Conv1D weights
llama          Llama 2 and 3
mistral        Mistral: a sliding window in every layer
qwen2          Qwen2 and 2.5: biases of q, k and v; windows in the upper layers
qwen3          Qwen3: q and k normed per head
gpt_neox       GPT-NeoX and Pythia: parallel residual, partial rotary, q, k and v interleaved by head
gemma          Gemma 1: scaled embedding, GeGLU, norms of 1 + weight
nanogpt        nanoGPT's ckpt.pt, for `model.conversion`
olmo2          OLMo 2: norms behind attention and MLP, q and k normed over the projection
"""
