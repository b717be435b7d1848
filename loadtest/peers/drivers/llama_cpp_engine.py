"""Driver of llama.cpp's and ik_llama.cpp's llama-batched-bench.

    python -m loadtest.peers.drivers.llama_cpp_engine BENCH MODEL THREADS [FLAG ...]

FLAGs are more flags of llama-batched-bench, which feeds tokens of its own instead of sampling. It is started anew for
each request of `protocol.py`, and its load time is not counted.
"""

import subprocess
import sys
import tempfile

from loadtest.peers.drivers.protocol import Prompts, Wave, serve

_PROMPT_SECONDS, _DECODE_SECONDS, _NUM_COLUMNS = 4, 6, 10  # columns of the printed table, and their number


def measure(prompts: Prompts, output_tokens: int) -> Wave:
    """Run llama-batched-bench with the number and length of these prompts, and return its times.

    Raises RuntimeError, with the end of the program's standard error, if the program fails or prints no times.
    """
    bench, model, threads, *flags = sys.argv[1:]
    sequences, length = len(prompts), len(prompts[0])
    steps = max(1, output_tokens - 1)  # the prompt step yields the first token
    command = [bench, "-m", model, "-t", threads, "-tb", threads, "-c", str(sequences * (length + steps))]
    command += ["-npp", str(length), "-ntg", str(steps), "-npl", str(sequences), *flags]
    for _ in range(3):  # llama-batched-bench sometimes exits with 0 and no output
        with tempfile.TemporaryDirectory() as directory:  # ik_llama.cpp writes a log into its directory
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=directory)
        lines = (done.stdout + done.stderr).splitlines()  # ik_llama.cpp prints the table to standard error
        rows = [line.strip(" |").split("|") for line in lines if line.startswith("|")]
        times = [row for row in rows if len(row) == _NUM_COLUMNS and row[0].strip().isdigit()]
        if times or done.returncode:
            break
    if not times:
        raise RuntimeError(f"llama-batched-bench failed with exit code {done.returncode}: {done.stderr[-300:]!r}")
    prompt, decode = float(times[-1][_PROMPT_SECONDS]), float(times[-1][_DECODE_SECONDS])
    if output_tokens == 1:
        return Wave(prompt, prompt, 0)
    return Wave(prompt, prompt + decode, sequences * steps)


if __name__ == "__main__":
    serve(measure)
