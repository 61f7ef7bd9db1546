# One image for the broker and for every service; compose.yaml says which of them a container runs.
FROM python:3.12-slim

# For builds of torch without CUDA: make a lock file of your own (`make lock`, docs/operations.md), and give both.
ARG PIP_EXTRA_INDEX_URL=""
ARG REQUIREMENTS=deploy/requirements.lock

# The CPU kernels are compiled at the first start; without a compiler plain PyTorch serves, several times slower.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /app
# Exactly the files whose hashes the lock file has, the build backend among them: nothing else is downloaded.
COPY ${REQUIREMENTS} requirements.lock
RUN pip install --no-cache-dir --require-hashes --requirement requirements.lock
COPY pyproject.toml README.md ./
COPY bench bench
COPY kernels kernels
COPY pagewire pagewire
COPY services services
COPY shared shared
RUN pip install --no-cache-dir --no-deps --no-build-isolation .
COPY deploy deploy

RUN useradd --uid 10001 --create-home pagewire && mkdir /data && chown pagewire /data
USER 10001
ENV PYTHONUNBUFFERED=1
CMD ["pagewire", "serve", "--host", "0.0.0.0"]
