# GPUs, on an image of torch: a tag with torch 2.11 to 2.15 and a compiler, which Triton needs (…-devel).
#   docker build -f examples/cuda.Dockerfile --build-arg TAG=… -t overlap1f1b:cuda .
#   docker run --rm --gpus all --ipc host overlap1f1b:cuda doctor
# Nobody has built this image here.
ARG TAG
FROM pytorch/pytorch:${TAG}
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY overlap1f1b overlap1f1b
COPY kernels kernels
# Images whose Python is the system's ask for this.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
# Without constraints, so that the image's torch stays.
RUN pip install --no-cache-dir .
ENV CUDA_DEVICE_MAX_CONNECTIONS=32
WORKDIR /work
ENTRYPOINT ["overlap1f1b"]
CMD ["doctor"]
