#!/usr/bin/env bash
# Run the CPU image without compose, with the same protections:
#
#     docker build --tag kvasir:cpu .
#     deploy/docker-run.sh CHECKPOINT_DIRECTORY [options of docker run]
#
# For example: deploy/docker-run.sh checkpoints/kvasir-20m --env KVASIR_MAX_NUM_RUNNING=32
# Variables: ENGINE (docker), IMAGE (kvasir:cpu, which `docker build --tag kvasir:cpu .` makes), PUBLISH_PORT (8000).
set -euo pipefail

if [[ $# -lt 1 || ! -d $1 ]]; then
    echo "usage: $0 CHECKPOINT_DIRECTORY [options of docker run]" >&2
    exit 2
fi
checkpoint=$(cd "$1" && pwd)
shift
exec "${ENGINE:-docker}" run --rm --name kvasir --init \
    --read-only --cap-drop ALL --security-opt no-new-privileges:true --user 10001:10001 \
    --tmpfs /tmp:size=256m,mode=1777 --shm-size 256m --volume kvasir-cache:/var/cache/kvasir \
    --cpus 2 --memory 4g --pids-limit 256 --stop-timeout 45 \
    --log-driver json-file --log-opt max-size=10m --log-opt max-file=3 \
    --publish "127.0.0.1:${PUBLISH_PORT:-8000}:8000" \
    --volume "$checkpoint":/checkpoint:ro \
    "$@" "${IMAGE:-kvasir:cpu}"
