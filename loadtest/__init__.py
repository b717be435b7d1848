"""Load and measurement, from outside: black box over HTTP, except where the name says engine, service, frontend,
attention or training.

workload          seeded requests made of real text (tales.txt: Grimm, public domain)
outcome           what became of one request; a completion response, understood
sse_client        HTTP and SSE read byte by byte as they arrive; asyncio and blocking drivers
discovery         what a client asks of a service before it loads it
slo               service level objectives and the exit code they decide
report            results.json with the keys of `vllm bench serve`, its table, its pictures
locustfile        the same clients as locust users (gevent: never import it beside asyncio)
bench_http        closed loop at N streams, open loop at a rate
spread            median and spread of repeated figures, and of their ratios
provenance        commit, machine and versions: what a figure is worth nothing without
closed_loop       the engine driven in-process as N clients in a closed loop would
in_process        a checkpoint's engine, built as the service builds it
bench_arguments   what `kvasir bench` is told, torch-free
bench_engine      `kvasir bench`: the engine in-process over batch size, context and prompt length
engine_points     what it measures, and what each repeat showed
step_work         bytes and FLOPs of a step by closed formula; with the next, the roofline
roofline          bytes and FLOPs a second that this machine can do, by a short probe
shape_names       the shapes S and M, to measure without a checkpoint
shapes            models of random weights of these shapes
foreign_work      how much of the machine others take meanwhile
processor_probe   what its processors give just now
peers             a package: drivers that run other engines in their own environments
bench_peers       other engines and servers beside ours, turn about, in one run
bench_peers_table  who they are, and how each is started
bench_peers_cells  what is measured of them, what has been, and the ratios
bench_peers_install  their environments, builds and model files
bench_peers_processes  engines and servers as child processes, asked alike
service_process   `kvasir serve` as a child process, and what /proc says about it
bench_service     the running service against the engine, start time, idle cost, footprint
bench_overload    four times the rate at saturation: what becomes of those who are admitted, and of the others
overload_load     its loads, and what they showed
sdk_caller        a user of OpenAI's Python SDK beside it: what its code sees
instant_engine    an engine that computes nothing, in the worker of a real service
bench_speculation  drafts by prompt lookup: what they save, and cost
bench_frontend    that service: what HTTP, JSON and queues cost a token
bench_latency     who waits for whom: a short prompt for those who stream, and they for a long one
steady_streams    streams that go on meanwhile: when each of their tokens came
interruption      what an arrival does to these: steps and gaps between times
latency_plot      its picture: what a long prompt costs others over how long it takes
bench_recovery    how long streams pause when the worker is killed
performance_page  docs/performance.md from docs/results/*.json
page_aims         its part on what is aimed at beside promises and other engines' speed
page_engine       its part on the engine in-process
page_kernels      its part on decode attention alone
page_peers        its part on other engines
page_scaling      its part on how the service scales
bench_scaling     steps, KV memory, shared beginnings and starts over their sizes, with fitted exponents
scaling_engine    what of it is the engine's
scaling_start     what of it is a service's start, over its checkpoint's size
scaling_fits      power laws and lines through measured points
scaling_plot      its picture
page_latency      its part on who waits for whom
page_text         how it writes medians and tables
performance_plot  its pictures
attention_rows    the mechanisms of attention: a recipe each, and what it changes
attention_training  each of them trained by `kvasir train`
attention_speed   each of them timed, trained and served, in turn
bench_attention   both, as docs/results/attention.json
attention_page    the measured parts of docs/attention.md
attention_noise   how much of a difference between them is luck
attention_plot    their picture
training_trials   small runs that differ in one choice of the default model's recipe
gpu_suite.sh      every GPU test and benchmark in nine minutes, for a card that is borrowed
bench_gpu         its measurements, a part at a time
gpu_parts         what they are
gpu_prefill       of these, steps of one prompt: recorded in pieces, and not
gpu_setting       where, and how much of each
gpu_peers         transformers' continuous batching, beside ours
gpu_report        the one JSON it writes
bench_structured  llguidance against xgrammar: compilation, masks, import
bench_kernels     decode attention by our kernel and by PyTorch's, against what memory gives
bench_document_attention  attention of documents side by side against flash attention
"""
