"""Entry point of the load test: `python -m loadtest ARGUMENTS`, the command of its image.

A word as first argument, such as `sweep`, is a command of `kvasir loadtest`. Otherwise all arguments are locust's.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    program = ["locust", "-f", str(Path(__file__).with_name("locustfile.py"))]
    if sys.argv[1:2] and sys.argv[1].isalpha():
        program = ["loadtest.sweep.command"]
    elif {"-h", "--help"} & set(sys.argv):
        program = ["loadtest.locustfile"]  # locust's own --help ends before it reads a locustfile
    os.execv(sys.executable, [sys.executable, "-m", *program, *sys.argv[1:]])
