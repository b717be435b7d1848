"""The engine: decide, execute, commit. Single-threaded, and unaware of HTTP.

config        EngineConfig: sizes and budgets
sequence      one request inside the engine
block_pool    who owns which KV block; pure Python
prefix_cache  what has been computed before
endings       drawn tokens join their sequence; when one ends it, and what may not come next
prompt_lookup drafts of what may follow, from what followed before
step_cost     what one row more costs a step, measured
drafting      whose next tokens a step guesses, and how many: where their chance is worth their price
prompt_pace   how many of a prompt's tokens a step computes beside others' next ones
running_limit how many sequences run at once, so that the mean time between tokens keeps a target
fair_queue    who waits, and whose turn it is: owners by what they were served, their sequences by rank
plan          what one step computes: a frozen value
scheduler     who computes how much in the next step; pure Python
inputs        a plan's integers become the runner's tensors
decode_inputs the same of steps that only decode, moved on from the step before
pooling       hidden states become an embedding
runner        owns the model and the KV tensors
graphs        decode steps recorded once and replayed: buckets of shapes, static inputs, CUDA graphs
prompt_graphs  steps with prompts recorded in pieces, between two layers' attentions
memory        what of a GPU's memory the KV-cache may take: the largest step, tried
recording_memory  what recordings take of it, two of each kind tried
accelerated   all that an engine takes of a GPU, or leaves out with a warning
grammars      sequences that follow a grammar: compiled and masked in threads beside the engine's
detokenizer   ids to safe text; stop strings
deltas        what is told of a sequence at its end
lookahead     the step after one whose tokens are not known yet, decided
steps         steps computed one after the other, or launched ahead where a device computes beside the host
engine        composition root and `step()`
"""
