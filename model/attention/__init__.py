"""One file a way to attend. `interface` holds the contract and the table of backends.

interface  AttentionMetadata, the AttentionBackend protocol, ATTENTION_BACKENDS
eager      softmax(QK^T/sqrt(d) + causal mask)V written out: the oracle
sdpa       the fused kernel of PyTorch, CPU and GPU
"""
