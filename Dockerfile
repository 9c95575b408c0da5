# One image for the gateway and the invokers:
#
#     docker build -t hypercast:0.1.0 .                               GPU (CUDA 13, as torch brings it)
#     docker build -t hypercast:0.1.0 --build-arg EXTRAS=gpu .        GPU with CUDA 12
#     docker build -t hypercast:0.1.0 --build-arg EXTRAS=gpu13,rdma . with RDMA
#     docker build -t hypercast:0.1.0 --build-arg EXTRAS= .           processors only
#     docker run hypercast:0.1.0 gateway --help
#
# PIP_EXTRA_INDEX_URL names a further package index: with PyTorch's index of CPU builds the image for processors has no
# CUDA libraries, which are several GB.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
ARG EXTRAS=gpu13
# A compiler for packages that have no wheel on this platform; it stays in this stage.
RUN case "${EXTRAS}" in *rdma*) verbs="cmake libibverbs-dev librdmacm-dev pkg-config" ;; esac \
    && apt-get update \
    && apt-get install --yes --no-install-recommends build-essential ${verbs:-} \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/hypercast
ENV PATH=/opt/hypercast/bin:$PATH
WORKDIR /src
ARG PIP_EXTRA_INDEX_URL=
# The dependencies change seldom and are large: a layer of their own, made from the metadata alone.
COPY pyproject.toml constraints.txt README.md ./
RUN pip install --no-cache-dir --no-compile --constraint constraints.txt ".${EXTRAS:+[${EXTRAS}]}" \
    && pip uninstall --yes hypercast
# Without what only serves to build and test other packages. Containers are read-only, so bytecode is made here; what does
# not compile are templates, which nothing imports.
RUN cd /opt/hypercast/lib/python3*/site-packages \
    && rm -rf torch/include torch/test pyarrow/include pyarrow/src \
    && find torch/bin -type f -not -name torch_shm_manager -delete \
    && find . -type d -name tests -prune -exec rm -rf {} + \
    && { python -m compileall -q -j 0 . || true; }
COPY rdmacast/ rdmacast/
COPY registry/ registry/
COPY gateway/ gateway/
COPY invoker/ invoker/
COPY cli/ cli/
COPY benchmarks/ benchmarks/
COPY functions/ functions/
RUN pip install --no-cache-dir --no-deps . \
    && pip uninstall --yes pip

FROM ${PYTHON_IMAGE}
ARG EXTRAS=gpu13
RUN case "${EXTRAS}" in *rdma*) \
        apt-get update \
        && apt-get install --yes --no-install-recommends ibverbs-providers librdmacm1 \
        && rm -rf /var/lib/apt/lists/* ;; \
    esac
RUN groupadd --gid 10001 hypercast \
    && useradd --uid 10001 --gid 10001 --home-dir /var/lib/hypercast --shell /usr/sbin/nologin hypercast \
    && install --directory --owner 10001 --group 10001 --mode 0750 \
        /var/lib/hypercast /var/lib/hypercast/data /var/lib/hypercast/store /run/hypercast-shm
COPY --from=build /opt/hypercast /opt/hypercast
ENV PATH=/opt/hypercast/bin:$PATH \
    HOME=/var/lib/hypercast \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /var/lib/hypercast
# The gateway's HTTP; an invoker's channel, region server and links of stages.
EXPOSE 8080 7400 7401 7402
ENTRYPOINT ["hypercast"]
CMD ["--help"]
