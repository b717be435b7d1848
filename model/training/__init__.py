"""From text to a checkpoint. Nothing in `service.engine` knows this package.

bpe       learn a byte-level BPE
data      sources, held-out splits, deterministic batches
corpus    what a run learns from: its sources, tokenizer and windows
conversations  a corpus's records as conversations, and which of their tokens are learned
story_requests  requests for a story, found in the story
encyclopedia_questions  questions that the beginning of an article answers
sentences  English text in lines and sentences, by simple rules
config    TrainConfig: a TOML file, frozen and complete
optimizer Muon for matrices, AdamW for the rest; the schedule
state     save and resume a run, exactly, without pickle
train     the loop: progress, evaluation, samples, loss curve
evaluate  the held-out loss: nats a token, bits per byte
card      MODEL_CARD.md from what was measured
"""
