# docker build .                                     service for CPUs
# docker build --build-arg TORCH_VARIANT=cuda .      service for NVIDIA GPUs
# docker build --target loadtest .                   load test with locust, without torch
#
# Needs BuildKit: Docker Engine 23.0, 20.10 with DOCKER_BUILDKIT=1, or Podman 4.3 with --format docker (for HEALTHCHECK).
# Python's official image. With another tag and digest, or a mirror: --build-arg BASE_IMAGE=python@sha256:...
ARG BASE_IMAGE=python:3.12.14-slim-trixie@sha256:f77ac9e44ae96ef2c90b8053ea08c31f8be030f824196b0ae4db6d462c84e51f

FROM ${BASE_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/kvasir/bin:$PATH
# A numeric user id, because Kubernetes' runAsNonRoot can verify only numeric ids.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin kvasir

FROM base AS build-loadtest
RUN python -m venv /opt/kvasir
COPY requirements/loadtest.txt /src/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --only-binary=:all: --require-hashes --no-deps --requirement /src/loadtest.txt

FROM base AS loadtest
RUN install --directory --owner=kvasir --group=kvasir /results
COPY --from=build-loadtest /opt/kvasir /opt/kvasir
COPY loadtest /srv/loadtest
# Defaults are variables, not CMD, so that an argument of `docker run` overrides one default and keeps the others.
ENV PYTHONPATH=/srv \
    LOCUST_HEADLESS=true \
    LOCUST_HOST=http://kvasir:8000 \
    LOCUST_USERS=16 \
    LOCUST_SPAWN_RATE=16 \
    LOCUST_RUN_TIME=60s \
    LOCUST_RESULTS=/results
WORKDIR /tmp
USER 10001:10001
ENTRYPOINT ["python", "-m", "loadtest"]

# Install dependencies before copying sources: dependencies change less often, and installing torch takes minutes.
# Dependencies come as wheels only. The compiler is for the native kernels, which become part of the service's wheel.
FROM base AS build
WORKDIR /src
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/kvasir && python -m venv /opt/tools
COPY requirements requirements
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/tools/bin/pip install --no-compile --only-binary=:all: --require-hashes --no-deps --requirement requirements/tools.txt
# PyTorch's index has a build of torch for each CUDA version, and a CPU build of a tenth of the size.
# TORCH_INDEX sets another index, such as a mirror, or the index of another CUDA version.
ARG TORCH_VARIANT=cpu
ARG TORCH_INDEX
RUN --mount=type=cache,target=/root/.cache/pip \
    case "$TORCH_VARIANT" in \
        cpu) build=cpu ;; \
        cuda) build=cu130 ;; \
        *) echo "TORCH_VARIANT must be cpu or cuda, not $TORCH_VARIANT" >&2; exit 1 ;; \
    esac \
    && pip install --no-compile --only-binary=:all: --require-hashes --no-deps --requirement requirements/serve.txt \
    && pip install --no-compile --only-binary=:all: \
        --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/$build}" --requirement requirements/torch.txt
# Compiling the kernels takes minutes, so only a change of the model's folder repeats it.
COPY model model
RUN python -m model.kernels.build
COPY README.md LICENSE pyproject.toml ./
COPY service service
COPY loadtest loadtest
RUN --mount=type=cache,target=/root/.cache/pip \
    pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . && pip install --no-compile --no-deps /wheels/*.whl
# Remove files that serving never loads: torch's headers and tests, pip, and on CPUs the dependencies of torch.compile.
# Then write bytecode, because a read-only root file system cannot store it later. Only modules that a start imports
# are compiled: 40 MB of bytecode instead of 115 MB.
RUN cd /opt/kvasir/lib/python*/site-packages \
    && rm -rf torch/include torch/share torch/test \
    && find torch/bin -type f ! -name torch_shm_manager -delete \
    && if [ "$TORCH_VARIANT" = cpu ]; then pip uninstall --quiet --yes sympy mpmath networkx; fi \
    && pip uninstall --quiet --yes pip \
    && python -m compileall -q model service \
    && python -c "import service.cli.main, service.cli.serve, service.worker.engine_factory, service.worker.worker, pydantic.v1, \
        uvicorn.lifespan.on, uvicorn.loops.auto, uvicorn.protocols.http.auto, uvicorn.protocols.websockets.auto"
RUN /opt/tools/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
    --output-file /opt/kvasir/sbom.cdx.json /opt/kvasir/bin/python

FROM base AS service
ARG TORCH_VARIANT=cpu
# Triton needs a C compiler at run time: it compiles a small launcher when a kernel is first used.
# hadolint ignore=DL3008
RUN if [ "$TORCH_VARIANT" = cuda ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; \
    fi
# Cache of kernels that are compiled at run time.
RUN install --directory --owner=kvasir --group=kvasir /var/cache/kvasir
COPY --from=build /opt/kvasir /opt/kvasir
ENV KVASIR_CHECKPOINT=/checkpoint \
    KVASIR_HOST=0.0.0.0 \
    KVASIR_PORT=8000 \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/kvasir/inductor \
    TRITON_CACHE_DIR=/var/cache/kvasir/triton
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s --retries=3 CMD ["python", "-m", "service.cli.healthcheck"]
CMD ["kvasir", "serve"]
# Last, because the arguments change with every build.
ARG VERSION=0.1.0
ARG REVISION
ARG SOURCE
ARG CREATED
LABEL org.opencontainers.image.title="Kvasir" \
    org.opencontainers.image.description="Inference service for decoder-only language models" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="$VERSION" \
    org.opencontainers.image.revision="$REVISION" \
    org.opencontainers.image.source="$SOURCE" \
    org.opencontainers.image.created="$CREATED"
