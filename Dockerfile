# docker build -t ingot .                                      for NVIDIA GPUs and CPUs, about 5 GB
# docker build --build-arg TORCH_INDEX=URL -t ingot:cpu .      for CPUs, about 1 GB; pytorch.org/get-started names the URL
# docker run --rm -v "$PWD/runs:/data/runs" ingot train --recipe demo      (with a GPU: add --gpus all)
FROM python:3.12-slim
# torch.compile needs a C++ compiler on CPUs and a C compiler on GPUs.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /ingot
COPY requirements.lock .
ARG TORCH_INDEX
RUN pip install --no-deps --require-hashes -r requirements.lock \
    && pip install torch==2.13.0 ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
COPY pyproject.toml README.md LICENSE .
COPY src src
RUN pip install --no-deps --no-build-isolation .
WORKDIR /data
ENTRYPOINT ["ingot"]
