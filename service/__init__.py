"""The processes around the engine, and their wire.

messages         the contract between frontend and worker: frozen, torch-free values
settings         the only reader of environment and arguments
schemas          the OpenAI wire contract in pydantic; the error tree and its HTTP statuses
frontend         LitSpec: routes, tokenization, admission, SSE, cancel, replay
worker           LitAPI builds the engine, LitLoop runs it, in one thread
server           supervision and drain
metric_families  every metric once: name, unit, help, labels, buckets
metrics          observes, and exposes what all processes have observed
engine/          single-threaded and synchronous: scheduler, blocks, runner
playground/      the page people open first
cli              `kvasir`: one table of commands
"""
