"""From text to a checkpoint. Nothing in `service.engine` knows this package.

bpe       learn a byte-level BPE
data      sources: read, cut into documents, held-out splits
contamination  nothing that quotes a held-out text is trained on
mixture   the order of learning: documents of all sources, by weight, in rounds
packing   batches: documents side by side, or rows cut from a stream of them
attention attention that stays within each of many documents, and its gradient
corpus    what a run learns from: its sources, tokenizer and mixtures
conversations  a corpus's records as conversations, and which of their tokens are learned
story_requests  requests for a story, found in the story
encyclopedia_questions  questions that the beginning of an article answers
sentences  English text in lines and sentences, by simple rules
config    TrainConfig: a TOML file, frozen and complete
optimizer Muon for matrices, AdamW for the rest; the schedule
state     save and resume a run, exactly, without pickle
pace      how long a run will be: by its config, or until a deadline
train     the loop: steps, held-out losses, saves
progress  how far a run is, and for how long it still goes on
finish    the end: the checkpoint directory, measured as it will be served
card      MODEL_CARD.md from what was measured
own_run   a text of one's own becomes a checkpoint within some minutes
own_text  its files, checked, and cut into documents
plan      its recipe: vocabulary, model and steps, from text, time and speed
speed     how fast this machine trains a model
recipe    a config written as a recipe
"""
