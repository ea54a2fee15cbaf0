# CPUs: docker build -f examples/cpu.Dockerfile -t overlap1f1b . && docker run --rm overlap1f1b
# Nobody has built this image here.
FROM python:3.11-slim
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY overlap1f1b overlap1f1b
COPY kernels kernels
# The build without CUDA; PyPI's brings CUDA's libraries.
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir . -c constraints.txt
WORKDIR /work
ENTRYPOINT ["overlap1f1b"]
CMD ["train"]
