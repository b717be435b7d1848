"""What a model is worth, measured the same way by training and by `kvasir eval`. Knows no server and no recipe.

likelihood  the log-likelihood of token ids: one definition for every figure
held_out    texts: bits per byte, nats a token, top-1 accuracy; and lm-evaluation-harness's rolling log-likelihood
pairs       minimal pairs: is the grammatical sentence the likelier one?
prompts     the fixed prompts, as token ids of a checkpoint
diversity   what samples repeat: distinct-n, repetition
samples     completions of the fixed prompts
evaluation  all of it of one checkpoint: `Evaluation`
harness     the same texts and pairs as tasks of lm-evaluation-harness, torch-free
"""
