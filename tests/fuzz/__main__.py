"""`python -m tests.fuzz --seconds 60`: each target so long, guided by the code that its inputs reach.

Each runs in a process of its own, for libFuzzer ends the process that it ran in. What failed is written to `--keep`,
and the exit code is 1; `python -m tests.fuzz --replay FILE --target NAME` runs it again.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from tests.fuzz.targets import TARGETS

# Longer than any target takes for one input; what takes longer counts as a hang.
_HANG_SECONDS = 20
_MEMORY_MB = 3000
_LONGEST = 20_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz what reads bytes of strangers.")
    parser.add_argument("--seconds", type=int, default=60, help="of each target")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers; 0 takes the clock")
    parser.add_argument("--target", choices=TARGETS, action="append", help="may be repeated (default: all)")
    parser.add_argument("--keep", type=Path, default=Path("runs/fuzz"), help="where failures and corpora are kept")
    parser.add_argument("--replay", type=Path, help="run one input of --target, without fuzzing")
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
