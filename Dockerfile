# One image for the broker and for every service; compose.yaml says which of them a container runs.
# A release pins the digest of the base.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build

# For builds of torch without CUDA: make a lock file of your own (`make lock`, docs/operations.md), and give both.
ARG PIP_EXTRA_INDEX_URL=""
ARG REQUIREMENTS=deploy/requirements.lock

RUN apt-get update && apt-get install --yes --no-install-recommends g++
RUN python -m venv --without-pip /opt/pagewire

WORKDIR /src
# Exactly the files whose hashes the lock file has, the build backend among them: nothing else is downloaded.
COPY ${REQUIREMENTS} requirements.lock
# What PyTorch brings for those who compile or test against it stays out.
RUN pip --python /opt/pagewire install --no-cache-dir --no-compile --require-hashes --requirement requirements.lock \
    && cd /opt/pagewire/lib/python3*/site-packages/torch && rm -rf include test bin/test_* bin/protoc*
COPY pyproject.toml README.md ./
COPY bench bench
COPY kernels kernels
COPY pagewire pagewire
COPY services services
COPY shared shared
RUN pip --python /opt/pagewire install --no-cache-dir --no-deps --no-build-isolation .
# The CPU kernels for every class of machines, since the image has no compiler and runs on machines unlike this one.
WORKDIR /
RUN /opt/pagewire/bin/python -m pagewire.kernels.cpu --ahead
# One answer tries the image, and leaves the bytecode of what the services import: all of it would take 250 MB.
RUN /opt/pagewire/bin/pagewire demo --model bundled

FROM ${BASE}

LABEL org.opencontainers.image.title="Pagewire" \
    org.opencontainers.image.description="Serves large language models as a pipeline of services over NATS" \
    org.opencontainers.image.licenses="Apache-2.0"

# For a GPU, Triton builds its launcher at the first start: compose.gpu.yaml names a C compiler here.
ARG PACKAGES=""
RUN if [ -n "${PACKAGES}" ]; then \
        apt-get update && apt-get install --yes --no-install-recommends ${PACKAGES} && rm -rf /var/lib/apt/lists/*; fi
RUN rm -rf $(python -c "import pip; print(*pip.__path__)") $(which -a pip pip3)

RUN useradd --uid 10001 --create-home pagewire && mkdir /data && chown pagewire /data
COPY --from=build /opt/pagewire /opt/pagewire
WORKDIR /app
COPY deploy deploy
USER 10001
ENV PATH=/opt/pagewire/bin:${PATH} PYTHONUNBUFFERED=1
CMD ["pagewire", "serve", "--host", "0.0.0.0"]
