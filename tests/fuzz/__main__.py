"""`python -m tests.fuzz --seconds 60`: fuzz each target for this time, guided by code coverage.

Each target runs in a separate process, because libFuzzer ends its process. Inputs that fail are written below `--keep`,
and the exit code is 1. `python -m tests.fuzz --replay FILE --target NAME` runs such an input again.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from tests.fuzz.targets import TARGETS

# No target takes this long for one input; an input that takes longer counts as a hang.
_HANG_SECONDS = 20
_MEMORY_MB = 3000
_LONGEST = 20_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz the parsers of untrusted bytes.")
    parser.add_argument("--seconds", type=int, default=60, help="seconds for each target")
    parser.add_argument("--seed", type=int, default=1, help="random seed; 0: use the clock")
    parser.add_argument(
        "--target", choices=TARGETS, action="append", help="target to fuzz; may be repeated; default: all"
    )
    parser.add_argument("--keep", type=Path, default=Path("runs/fuzz"), help="directory for failing inputs and corpora")
    parser.add_argument("--replay", type=Path, help="file with one input to run on --target, without fuzzing")
    given = parser.parse_args()
    if given.replay is not None:
        TARGETS[given.target[0]](given.replay.read_bytes())
        return 0
    failed = [name for name in given.target or TARGETS if not _is_passed(name, given)]
    print(f"failed: {', '.join(failed)}" if failed else "nothing failed", flush=True)
    return 1 if failed else 0


def _is_passed(name: str, given: argparse.Namespace) -> bool:
    corpus, found = given.keep / name / "corpus", given.keep / name / "found"
    for directory in (corpus, found):
        directory.mkdir(parents=True, exist_ok=True)
    print(f"{name}: {given.seconds} s", flush=True)
    bounds = (f"-timeout={_HANG_SECONDS}", f"-rss_limit_mb={_MEMORY_MB}", f"-max_len={_LONGEST}", "-verbosity=0")
    run = (
        f"-max_total_time={given.seconds}",
        f"-seed={given.seed}",
        f"-artifact_prefix={found}/",
        "-print_final_stats=1",
    )
    program = [sys.executable, "-m", "tests.fuzz.guided", name, *bounds, *run, str(corpus)]
    return subprocess.run(program, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
