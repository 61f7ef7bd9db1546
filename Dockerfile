# One image for the broker and for every service; compose.yaml says which of them a container runs.
FROM python:3.12-slim

# For builds of torch without CUDA, or for a mirror: docker compose build --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL=""

# The CPU kernels are compiled at the first start; without a compiler plain PyTorch serves, several times slower.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY pyproject.toml README.md ./
COPY bench bench
COPY kernels kernels
COPY pagewire pagewire
COPY services services
COPY shared shared
RUN pip install --no-cache-dir .
COPY deploy deploy

RUN useradd --system --create-home pagewire && mkdir /data && chown pagewire /data
USER pagewire
ENV PYTHONUNBUFFERED=1
CMD ["pagewire", "serve"]
