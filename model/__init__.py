"""Tensors and files: the transformer, its KV-cache, its tokenizer, its checkpoints, its training.

Knows no request, no HTTP and no metric, and imports nothing from `service`.

config         a model completely described: ModelConfig, frozen, torch-free
kinds          the choices it is made of: attention, positions, norms, MLPs, rope scaling
sampling_params  how one completion is drawn: SamplingParams
json_file      JSON objects and texts beside the weights, read with care, torch-free
generation_config  how a checkpoint wants to be sampled: its generation_config.json, torch-free
attention/     one file a way to attend, behind one table
kernels/       kernels of our own in C++, built once, for CPUs
positions      learned, sinusoidal and rotary positions
layers         norms and MLPs
transformer    the whole architecture on one page
linear         how a matrix is multiplied while serving: plain, packed for the CPU's kernels, in eight bits
packing        matrices in the order in which our own kernels read them
native_transformer  the transformer by our own kernels, on CPUs: one call for all layers, or for a whole step of decodes
native_decode  a step of decodes made ready for them, to be computed again as it moves on
native_calls   the attention of all layers, made ready for them
native_parts   a model's shape and matrices as they take them
fused          on a GPU one kernel instead of several between matrix products
fused_kernels  those kernels, in Triton
eight_bits     on a GPU matrices in int8 or fp8: PyTorch's products, and ours for few rows
eight_bit_kernels  ours, in Triton
kv_cache       the block pool's tensors: write, gather
pages          memory of the CPU: packed weights in pages of 2 MiB, the pool in pages that come when they are touched
sampling       batched, position-seeded sampling
token_rules    what a request says of single tokens, and what of that holds for the next one, torch-free
ruled_logits   the same, applied to logits: bias, penalties, what may not come
tokenizer/     text to ids and back: byte-level BPE as a tiktoken.Encoding, or the tokenizers library; StreamDecoder
manifest       the door to a checkpoint directory of either kind, verified before anything is loaded, torch-free
checkpoint_files  JSON, plain names, hashes; CheckpointError
safetensors_header  which tensor stands where in a file, torch-free
system/        the machine below: CPUs and memory that this process may use, torch-free
permissions    advice for files that this process may not read, torch-free
parent_death   processes that end with the process that started them, torch-free
error_line     what an error says as one line, whatever stood in the file, torch-free
families/      other people's checkpoints: config map and name map of each Hugging Face family, torch-free
weights        tensors from files into their final place, never a second copy
finite_weights NaN and infinity in stored weights, refused as they are read
freed_memory   what was freed goes back to the system, torch-free
shards         weight files: model.safetensors, or shards of at most 5 GB with an index
checkpoint     a directory as a model, a model as a directory
conversion/    checkpoints of one kind made into another: nanoGPT, pickles, to Hugging Face; no code in a file is run
formula        closed formulas that know their value
parameter_counts  parameters of each part, by formula and from the tensors' shapes, torch-free
grammar        which tokens may come next, by a grammar: llguidance's masks over any vocabulary, torch-free
token_masks    those masks applied to logits
chat_template  a conversation as a prompt: a checkpoint's Jinja template, torch-free
template_sandbox  what such a template may do, and a process that bounds it
chatml         the marks of a conversation our models know, and their chat template, torch-free
control_marks  what a client says is text, never a control mark
generate       generation without a cache: the slow twin
evaluation/    what a model is worth: held-out texts, minimal pairs, samples
training/      data, bpe, train, evaluate
"""
