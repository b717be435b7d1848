#!/usr/bin/env bash
# Run every GPU test and benchmark in under nine minutes, and write one JSON report.
#
#     loadtest/gpu/suite.sh OUT.json [WHEELS]
#
# OUT.json is rewritten after every part. A part that fails or takes too long is recorded, and the next part runs.
# WHEELS is a folder of wheels that the machine lacks; nothing is downloaded. Without a CUDA device every part is
# reported as absent. Environment: PYTHON is the interpreter (default: python3), BUDGET the seconds in total (530),
# CHECKPOINT the served model (checkpoints/kvasir-9m).
set -u
if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    sed -n 2,9p "$0" | sed 's/^# \{0,1\}//' >&2
    exit 2
fi
out=$(realpath -m "$1")
wheels=${2:+$(realpath -m "$2")}
cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-python3}
budget=${BUDGET:-530}
checkpoint=${CHECKPOINT:-checkpoints/kvasir-9m}
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
rm -f "$out"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

# part NAME SECONDS COMMAND...: run a part for at most SECONDS, within the budget.
part() {
    local name=$1 limit=$2 code began=$SECONDS
    shift 2
    local left=$((budget - SECONDS))
    if [ "$left" -lt "$limit" ]; then limit=$left; fi
    if [ "$limit" -lt 5 ]; then
        echo "no time left" >"$work/$name.log"
        code=124
    else
        timeout --kill-after=5 "$limit" "$@" >"$work/$name.log" 2>&1
        code=$?
    fi
    "$python" -m loadtest.gpu.report "$out" "$name" "$code" "$((SECONDS - began))" "$work/$name.log" "$work/$name.json"
}

# on_gpu NAME SECONDS COMMAND...: run a part if there is a device.
on_gpu() {
    if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>"$work/torch.log"; then
        part "$@"
    else
        echo '{"absent": "no CUDA device"}' >"$work/$1.json"
        part "$1" "$2" true
    fi
}

# tests NAME SECONDS FILE...: run pytest files as a part, without the project's settings: they name plugins that the
# machine may lack.
tests() {
    local name=$1 limit=$2
    shift 2
    on_gpu "$name" "$limit" "$python" -m pytest -q -c /dev/null --rootdir . -p no:cacheprovider -m gpu "$@"
}

# bench NAME SECONDS PROGRAM FLAG... [-- SETTING...]: run a benchmark of loadtest/inprocess as a part.
bench() {
    local name=$1 limit=$2 program=$3
    shift 3
    on_gpu "$name" "$limit" "$python" -m "loadtest.inprocess.$program" --out "$work/$name.json" "$@"
}

if [ -n "$wheels" ]; then
    part wheels 60 "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$work/site" "$wheels"/*.whl
    export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
fi
large="--shape qwen2-1.5b --context 1024 --prompt-tokens 1024"
batches="--batch 1 2 4 8 16 32 64"
# Most important parts first, in case the suite is stopped. Unquoted variables hold several words.
tests paged 150 tests/gpu/test_paged.py tests/gpu/test_fused.py tests/gpu/test_quantization.py
bench decode 120 bench_command $large $batches -- --dtype bfloat16
bench engine 90 bench_command --checkpoint "$checkpoint" --batch 1 16 64 256 --context 512 -- --max-num-running 256
bench int8 90 bench_command $large --batch 1 64 -- --dtype bfloat16 --quantize int8
bench fp8 90 bench_command $large --batch 1 64 -- --dtype bfloat16 --quantize fp8
tests engine_tests 100 tests/gpu/test_engine.py
bench attention 60 bench_kernels --device cuda --shape qwen2-1.5b qwen3-0.6b S $batches --context 1024 8192
tests mechanisms 100 tests/gpu/test_cuda.py
tests training 100 tests/gpu/test_cuda_training.py
echo "$out after $SECONDS s"
