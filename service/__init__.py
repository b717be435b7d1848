"""The processes around the engine, and their wire.

messages         the contract between frontend and worker: frozen, torch-free values
settings         the only reader of environment and arguments; the settings of what runs a model
command_settings the settings of the other commands
default_checkpoint  the shipped model, for commands that were given no checkpoint
options          how a setting is declared
sizes            sizes of memory in settings: 512M, 2GiB
flags            what a command's flags are called, and its help page
complaints       pydantic's complaints in our words
errors           the tree of errors that answer a request, and their HTTP statuses
schemas          the OpenAI wire contract in pydantic
chat_schemas     the same of requests that hold a conversation
responses        the answers, in OpenAI's shape
chat_responses   the same of conversations
logprobs         log-probabilities in the shapes that answers have
dialects         how an answer is worded: one route's words, or the other's
token_labels     tokens as labels: what cannot be seen gets a sign
attention_picture  attention weights as labelled heat maps
openapi          the document that describes it all
openapi_examples a request, an answer and an error of each kind, for that document
api_keys         who may use the server: keys with names, from a file or the environment
access           who may ask, and from which pages: the middleware around the routes; pure ASGI
http_protocol    HTTP itself, with bounds on a request's head, on waiting for clients, and on connections
half_close       whether a client that has closed its sending side still reads
checkpoint_stamp whether the weights are still those that were checked at the start
machine          what the service needs of the machine, found out before it starts
open_body        a way past ASGI's send for a body that is under way
open_files       how many connections the limit of open files leaves room for
requests         ids, body limits and error bodies around every request; pure ASGI
serving          what is served: a checkpoint's facts, and what the settings make of them
request_model    what every request is: strict, frozen, and nothing unknown in it
structured/      structured output: what is asked for, and whether it can be followed
bounded_process  a child process that works for strangers, within bounds
template_process a process that renders chat templates within bounds
intake           what the routes of the engine's need of their process
completions      the routes of completions and conversations
recordings       answers that outlive their connection: Last-Event-ID, Idempotency-Key
recording        one of them: recorded as it is made, played to whoever comes for it
turns            work done one piece at a time in a thread, and who waits for it
chat             a conversation becomes token ids
plan             a validated request becomes the sequences to compute
token_rules      what a request says of single tokens: biases, penalties, words that may not come
truncation       prompts that are cut to a length
admission        who may wait, and what the others are told
queue_terms      on which terms a request waits: whose it is, and how long it may
places           when places come free: what the answers that hold them have left
early_refusal    what has no chance is refused before it is read; pure ASGI
comebacks        what refused clients were told, who comes back, and whether it was right
rates            how fast the service has worked of late
backlog          what is kept of an answer until its client takes it, bounded
live_request     a request between admission and its end: its completions, and what has arrived of them
journal          every unfinished request: what was submitted, what came back, who waits
poison_detector  find the request that kills workers, and retry suspects alone
best_of          of each prompt's completions, those that are told
delivery         a stream of server-sent events, or one body
embedding_schemas the wire contract of texts as vectors
embeddings       the route of texts as vectors, which the engine pools
tokenizer_routes  the tokenizer and the chat template for those who count or compare
inspection       the routes of attention looks: what a prompt's tokens attend to
frontend         LitSpec: routes, tokenization, admission, SSE, cancel, replay
lifecycle        what the processes must know of each other, in shared memory
readiness        can a request be served now, and if not, why and how long
healthcheck      a container's health check: GET /ready with the standard library alone
server_memory    what a server on a CPU needs of the machine's memory beside the KV-cache, torch-free
serving_path     by which path tokens are computed: whose kernels, how, in which numbers
batch_completion many completions by the engine, without a server
engine_builder   from settings and a checkpoint to an engine; what "auto" means here
event_channel    the way of events from the worker to the API process: a Unix socket
driver           what the worker's thread does at every turn
worker           LitAPI builds the engine, LitLoop runs it, in one thread
early_worker     a worker's process, of which the first imports while main does, and a standby's does so last
first_worker     that process handed what LitServe starts a worker with
standby          the next worker, which waits for the present one to die
watchdog         tells when a process hangs
supervision      what main does about the deaths of others
ticks            uvicorn's main loop, once a second instead of ten times
server           the composition root: start and end, supervision and drain
logs             one line each, the process named
leftovers        directories that a killed service has left
metric_families  every metric once: name, unit, help, labels, buckets
tally            observations of one histogram, gathered
step_tally       what metrics are told of steps, gathered
metrics          observes, and exposes what all processes have observed
engine/          single-threaded and synchronous: scheduler, blocks, runner
playground/      the page people open first
entry            the program `kvasir`: Ctrl-C first, then the command line
interrupts       Ctrl-C before a command runs: exit code 130, nothing printed
cli              `kvasir`: one table of commands
commands/        one file a command
"""
