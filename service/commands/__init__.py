"""One file a command of `kvasir`, each with `main(settings) -> exit code`; `bench` reads its own arguments.

They are imported when `service.cli` has understood the flags: torch takes seconds.

serve     HTTP service
generate  a completion without a server
train     model.training.train
eval      a checkpoint measured: held-out texts, minimal pairs, samples
bench     loadtest.bench_engine
convert   nanoGPT's ckpt.pt or pickles to safetensors, a checkpoint of ours to a Hugging Face directory
program   how to call us again
tokenize  text to ids, torch-free
export_tokenizer  a tokenizer as a Hugging Face directory, torch-free
inspect   a checkpoint's facts, torch-free
inspect_params     its parameters by formula and by tensor, torch-free
inspect_attention  where a prompt's tokens look, as a picture
"""
