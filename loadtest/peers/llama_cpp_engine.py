"""llama.cpp's own benchmark of batches as a driver: `python -m loadtest.peers.llama_cpp_engine BENCH MODEL THREADS`.

llama-batched-bench computes prompts, then steps of all sequences together, without drawing tokens: it feeds random
ones, so that there are none to tell. It is started for each wave; loading is in no figure.
"""

import json
import subprocess
import sys

from loadtest.peers.protocol import Prompts, Wave, serve

# Now and then it ends well without having said anything.
_ATTEMPTS = 3


def main() -> None:
    """Answer by running the benchmark."""
    bench, model, threads = sys.argv[1:]

    def measure(prompts: Prompts, output_tokens: int) -> Wave:
        sequences, length = len(prompts), len(prompts[0])
        steps = max(1, output_tokens - 1)  # the first token comes of the prompt
        command = [bench, "-m", model, "-t", threads, "-tb", threads, "-c", str(sequences * (length + steps))]
        command += ["-npp", str(length), "-ntg", str(steps), "-npl", str(sequences), "--output-format", "jsonl"]
        for _ in range(_ATTEMPTS):
            done = subprocess.run(command, capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if lines or done.returncode:
                break
        if not lines:
            raise RuntimeError(f"llama-batched-bench ended with {done.returncode}: {done.stderr[-300:]!r}")
        told = json.loads(lines[-1])
        if output_tokens == 1:
            return Wave(told["t_pp"], told["t_pp"], 0, [])
        return Wave(told["t_pp"], told["t_pp"] + told["t_tg"], sequences * steps, [])

    serve(measure)


if __name__ == "__main__":
    main()
