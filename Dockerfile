# docker build -t axl .    (for a TPU: --build-arg EXTRAS=rl,hf,tpu; for GPUs: rl,hf,cuda)
FROM python:3.12-slim
ARG EXTRAS=rl,hf
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip wheel --no-cache-dir --no-deps -w /dist /src && pip install --no-cache-dir -c /src/constraints.txt "$(ls /dist/*.whl)[$EXTRAS]"
WORKDIR /runs
ENTRYPOINT ["axl"]
