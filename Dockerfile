# The sidecar without torch, and a vLLM that has its connector.
#
#   docker build -t prefix-kvstore .
#   docker build -t vllm-with-kvstore:0.32.0 --target vllm .
FROM python:3.12.8-slim-bookworm AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY hashing hashing
COPY kvstore kvstore
COPY prefill prefill
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12.8-slim-bookworm AS installed
COPY constraints.txt /constraints.txt
COPY --from=wheel /wheels /wheels
RUN python -m venv /opt/kvstore \
    && /opt/kvstore/bin/python -m pip install --no-cache-dir --constraint /constraints.txt /wheels/*.whl

FROM vllm/vllm-openai:v0.32.0 AS vllm
COPY --from=wheel /wheels /wheels
RUN python3 -m pip install --no-cache-dir /wheels/*.whl \
    && install --directory --owner=1000 --group=1000 /models
# The sidecar's user: only the same user may open its socket and map its pool. The image has no such user, so
# its name, which torch asks for when it looks for a cache folder, has to come from the environment.
ENV HOME=/models \
    USER=kvstore
USER 1000:1000
ENTRYPOINT ["vllm", "serve"]

FROM python:3.12.8-slim-bookworm AS kvstore
COPY --from=installed /opt/kvstore /opt/kvstore
RUN groupadd --gid 1000 kvstore \
    && useradd --uid 1000 --gid 1000 --no-create-home --shell /usr/sbin/nologin kvstore
ENV PATH=/opt/kvstore/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
EXPOSE 9470
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --start-interval=1s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9470/healthz', timeout=2)"]
ENTRYPOINT ["kvstore"]
CMD ["serve"]
