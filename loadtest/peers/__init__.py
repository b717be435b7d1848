"""One driver for each engine that `loadtest.bench_peers` compares with ours: programs that run in the peer's own
environment, hold a model, and answer `loadtest.peers.protocol` on standard input and output. NAME.txt pins what that
environment holds.

protocol               a wave of prompts in, its seconds out: JSON lines
ours_engine            this repository's engine, asked alike
llama_cpp_engine       llama.cpp, its benchmark of batches
openvino_engine        OpenVINO GenAI, continuous batching
transformers_engine    transformers, generate: a fixed batch
transformers_batching  transformers, generate_batch: continuous batching
litgpt_engine          litgpt, generate: a fixed batch
llama_cpp_model        our export as a GGUF file
litgpt_model           our export as litgpt's files
"""
