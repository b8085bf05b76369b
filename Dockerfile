# Two stages: the first compiles the kernels of every instruction set, the second has no compiler. Kernels choose theirs
# when they start, so one image serves every x86-64 or aarch64 machine that it was built for.
FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml requirements.txt CMakeLists.txt README.md LICENSE ./
COPY setup setup
COPY src src
RUN python -m venv /opt/pageturner \
    && /opt/pageturner/bin/pip install --no-cache-dir --require-hashes -r requirements.txt \
    && /opt/pageturner/bin/pip install --no-cache-dir --no-deps --config-settings=cmake.define.PAGETURNER_ISAS=all .

FROM python:3.12-slim-bookworm
RUN useradd --create-home --uid 10001 pageturner
COPY --from=build /opt/pageturner /opt/pageturner
ENV PATH=/opt/pageturner/bin:$PATH
USER 10001
# models are kept here: mount a volume, or every new container fetches them again
VOLUME /home/pageturner/.cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# all addresses of the container; publish the port to loopback, or set --api-key
ENTRYPOINT ["pageturner", "serve", "--host", "0.0.0.0"]
CMD ["smollm2"]
