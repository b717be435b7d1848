"""Driver of llama.cpp's llama-batched-bench: `python -m loadtest.peers.drivers.llama_cpp_engine BENCH MODEL THREADS`.

llama-batched-bench feeds random tokens instead of sampling. It is started anew for each request of `protocol.py`, and
its load time is not counted.
"""

import json
import subprocess
import sys

from loadtest.peers.drivers.protocol import Prompts, Wave, serve


def measure(prompts: Prompts, output_tokens: int) -> Wave:
    """Run llama-batched-bench with the number and length of these prompts, and return its times.

    Raises RuntimeError, with the end of the program's standard error, if the program fails or prints no times.
    """
    bench, model, threads = sys.argv[1:]
    sequences, length = len(prompts), len(prompts[0])
    steps = max(1, output_tokens - 1)  # the prompt step yields the first token
    command = [bench, "-m", model, "-t", threads, "-tb", threads, "-c", str(sequences * (length + steps))]
    command += ["-npp", str(length), "-ntg", str(steps), "-npl", str(sequences), "--output-format", "jsonl"]
    for _ in range(3):  # llama-batched-bench sometimes exits with 0 and no output
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if lines or done.returncode:
            break
    if not lines:
        raise RuntimeError(f"llama-batched-bench failed with exit code {done.returncode}: {done.stderr[-300:]!r}")
    result = json.loads(lines[-1])
    if output_tokens == 1:
        return Wave(result["t_pp"], result["t_pp"], 0)
    return Wave(result["t_pp"], result["t_pp"] + result["t_tg"], sequences * steps)


if __name__ == "__main__":
    serve(measure)
