#!/usr/bin/env bash
# Run every GPU test and benchmark in under nine minutes, a part at a time.
#
#     loadtest/gpu/suite.sh OUT [WHEELS]
#
# The new folder OUT gets NAME.log of every part, NAME.json of every benchmark, and a line for each part in summary.txt:
# its name, its state (passed, failed, cut short or absent), its exit code and its seconds. A part that fails or takes
# too long does not stop the next part. suite.json and page.md have all of it: see loadtest/gpu/report.py.
# WHEELS is a folder of wheels that the machine lacks, made by `python -m loadtest.gpu.wheels`; nothing is downloaded.
# Without a CUDA device every part is reported as absent. Environment: PYTHON is the interpreter (default: python3),
# BUDGET the seconds in total (530), CHECKPOINT the served model (checkpoints/kvasir-20m), PARTS the names of the parts
# to run (all). DRY_RUN=1 runs the parts without a GPU: benchmarks with a small model, and tests are only imported.
set -u
if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    sed -n 2,13p "$0" | sed 's/^# \{0,1\}//' >&2
    exit 2
fi
work=$(realpath -m "$1")
wheels=${2:+$(realpath -m "$2")}
cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-python3}
budget=${BUDGET:-530}
checkpoint=${CHECKPOINT:-checkpoints/kvasir-20m}
dry_run=${DRY_RUN:-}
if [ -e "$work" ]; then
    echo "$1 exists; choose a new folder" >&2
    exit 2
fi
mkdir -p "$work" || exit 2
site=$(mktemp -d) || exit 2
trap 'rm -rf "$site"' EXIT
export PYTHONUNBUFFERED=1

# part NAME SECONDS COMMAND...: run a part for at most SECONDS, within the budget.
part() {
    local name=$1 limit=$2 code began=$SECONDS
    shift 2
    case " ${PARTS:-$name} " in *" $name "*) ;; *) return ;; esac
    local left=$((budget - SECONDS))
    if [ "$left" -lt "$limit" ]; then limit=$left; fi
    if [ "$limit" -lt 5 ]; then
        echo "no time left" >"$work/$name.log"
        code=124
    else
        timeout --kill-after=5 "$limit" "$@" >"$work/$name.log" 2>&1
        code=$?
    fi
    local state=failed
    case $code in 0) state=passed ;; 124 | 137) state="cut short" ;; esac
    echo "$name: $state, exit code $code, $((SECONDS - began)) s" | tee -a "$work/summary.txt"
}

# on_gpu NAME SECONDS COMMAND...: run a part if there is a device.
on_gpu() {
    if [ -n "$dry_run" ] || "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        part "$@"
    else
        echo "$1: absent, no CUDA device" | tee -a "$work/summary.txt"
    fi
}

# tests NAME SECONDS FILE...: run pytest files as a part, without the project's settings: they name plugins that the
# machine may lack.
tests() {
    local name=$1 limit=$2
    shift 2
    set -- -m pytest -v --tb=short --durations=15 -c /dev/null --rootdir . -p no:cacheprovider -m gpu "$@"
    if [ -n "$dry_run" ]; then # exit code 5: all tests are deselected
        on_gpu "$name" "$limit" sh -c '"$@" --collect-only || [ $? -eq 5 ]' sh "$python" "$@"
    else
        on_gpu "$name" "$limit" "$python" "$@" --numprocesses 8 --junitxml "$work/$name.xml"
    fi
}

# bench NAME SECONDS PROGRAM FLAG... [-- SETTING...]: run a benchmark of loadtest/inprocess as a part.
bench() {
    local name=$1 limit=$2 program=$3
    shift 3
    if [ -n "$dry_run" ]; then
        set -- --checkpoint "$checkpoint" --batch 1 --context 64 --repeats 1 --steps 2
        if [ "$program" = bench_command ]; then set -- "$@" --prompt-tokens 16; fi
    fi
    on_gpu "$name" "$limit" "$python" -m "loadtest.inprocess.$program" --out "$work/$name.json" "$@"
}

if [ -n "$wheels" ]; then
    part wheels 40 "$python" -m pip install --quiet --no-index --no-deps --no-cache-dir --upgrade \
        --target "$site" "$wheels"/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
large="--shape qwen2-1.5b --context 1024 --prompt-tokens 1024"
batches="--batch 1 2 4 8 16 32 64"
# Most important parts first, in case the suite is stopped. Their limits and that of the wheels add up to BUDGET. Unquoted variables hold several words.
tests paged 80 tests/gpu/test_paged.py tests/gpu/test_fused.py tests/gpu/test_quantization.py
bench decode 60 bench_command $large $batches -- --dtype bfloat16
bench transformers 50 bench_transformers --shape qwen2-1.5b --context 1024 --batch 1 16 64
bench engine 50 bench_command --checkpoint "$checkpoint" --batch 1 16 64 256 --context 512 -- --max-num-running 256
bench int8 40 bench_command $large --batch 1 64 -- --dtype bfloat16 --quantize int8
bench fp8 40 bench_command $large --batch 1 64 -- --dtype bfloat16 --quantize fp8
tests engine_tests 65 tests/gpu/test_engine.py
bench attention 40 bench_command --shape qwen2-1.5b --batch 1 16 --context 1920 -- --dtype bfloat16 --attention sdpa
tests mechanisms 35 tests/gpu/test_cuda.py
tests training 30 tests/gpu/test_cuda_training.py
"$python" -m loadtest.gpu.report "$work"
echo "$work after $SECONDS s"
