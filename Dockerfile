# syntax=docker/dockerfile:1
# docker build .                                     the service, for CPUs
# docker build --build-arg TORCH_VARIANT=cuda .      the service, for NVIDIA GPUs
# docker build --target loadtest .                   the same, with locust
ARG PYTHON_VERSION=3.12
ARG TORCH_VARIANT=cpu

FROM python:${PYTHON_VERSION}-slim AS base
ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/kvasir/bin:$PATH

# Where torch comes from: its CPU wheels are a tenth of the size of PyPI's, which bring CUDA.
FROM base AS torch-cpu
ENV TORCH_INDEX=https://download.pytorch.org/whl/cpu
FROM base AS torch-cuda
ENV TORCH_INDEX=https://pypi.org/simple

# Dependencies before sources: they change less often, and torch takes minutes. Wheels only; the compiler is for our own
# kernels, which the wheel then carries.
# hadolint ignore=DL3006
FROM torch-${TORCH_VARIANT} AS build
WORKDIR /src
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/kvasir
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    > requirements.txt
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --only-binary=:all: --constraint constraints.txt --index-url "$TORCH_INDEX" torch \
    && pip install --only-binary=:all: --constraint constraints.txt --requirement requirements.txt
COPY README.md LICENSE ./
COPY model model
COPY service service
COPY loadtest loadtest
RUN python -m model.kernels.build
RUN --mount=type=cache,target=/root/.cache/pip \
    pip wheel --no-deps --wheel-dir /wheels . && pip install --no-deps /wheels/*.whl

FROM base AS runtime-cpu
FROM base AS runtime-cuda
# Triton compiles a few lines of C for each kernel, when it is first used.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# hadolint ignore=DL3006
FROM runtime-${TORCH_VARIANT} AS service
# A number, so that an orchestrator can see that it is not root's. The cache holds compiled kernels.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin kvasir \
    && install --directory --owner=kvasir --group=kvasir /var/cache/kvasir
COPY --from=build /opt/kvasir /opt/kvasir
ENV KVASIR_CHECKPOINT=/checkpoint \
    KVASIR_HOST=0.0.0.0 \
    KVASIR_PORT=8000 \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/kvasir/inductor \
    TRITON_CACHE_DIR=/var/cache/kvasir/triton
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000
# Slim images have no curl. http.client, because urllib would ask a proxy if the environment names one.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --start-interval=1s --retries=3 \
    CMD ["python", "-c", "from http.client import HTTPConnection as C; c = C('127.0.0.1', 8000, timeout=4); c.request('GET', '/ready'); raise SystemExit(c.getresponse().status != 200)"]
CMD ["kvasir", "serve"]

FROM service AS loadtest
USER 0
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=cache,target=/root/.cache/pip \
    pip install --only-binary=:all: "$(echo /wheels/*.whl)[loadtest]" \
    && install --directory --owner=kvasir --group=kvasir /results
COPY loadtest/locustfile.py /loadtest/locustfile.py
USER 10001:10001
HEALTHCHECK NONE
ENTRYPOINT ["locust", "--locustfile", "/loadtest/locustfile.py", "--headless", "--results", "/results"]
CMD ["--host", "http://kvasir:8000", "--users", "16", "--spawn-rate", "16", "--run-time", "60s"]
