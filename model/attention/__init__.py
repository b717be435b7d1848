"""One file a way to attend. `interface` holds the contract and the table of backends.

interface  the AttentionBackend protocol, ATTENTION_BACKENDS
metadata   AttentionMetadata: whose tokens a packed batch holds, and where their past lies
form       AttentionForm: a layer's scale, window and bias; what a token may see
biases     positions in the scores: RelativeBias (T5), AlibiBias, DisentangledBias (DeBERTa)
eager      softmax(scale QK^T + bias + causal mask)V written out: the oracle, and its weights
as_cached  AsCached: without a cache, keys and values rounded as one of another dtype would hold them
weights    weights_of_layer: what each token of a text attends to, for people to look at
sdpa       the fused kernel of PyTorch, CPU and GPU
native     a kernel of our own for CPUs that reads the cache's blocks where they lie
paged      for a GPU: decoding and prompt chunks each in a way of their own
ways       those ways, which of them hold on this device, and why not the others
paged_kernel  decoding in Triton: blocks read where they lie, each sequence by itself
varlen     prompt chunks by PyTorch's flash attention, whichever arguments its version has
ragged     RaggedView: a step that holds prompt chunks, laid end to end
"""
