# Every task of the project. Two of them are all a newcomer needs: `make serve` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?= smollm2
ARGS ?=
NAME ?= smaller
BASE ?= HEAD
TRACES ?= ../shared/data/traces
# one more than cores of a small machine: for half of their time tests wait for processes that they started
WORKERS ?= 3
ROUNDS ?= 3
ISAS ?= native
# tests start processes by the hundred: each finds our modules compiled, even where bytecode is not wanted
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest
NATIVE := src/pageturner/kernels/native/*.cpp src/pageturner/kernels/native/*.h tests/native/*.cpp tests/native/*.h
SOURCES := setup/install.py setup/pageturner_build.py pyproject.toml requirements.txt CMakeLists.txt $(wildcard src/pageturner/kernels/native/*.h src/pageturner/kernels/native/*.cpp)

.DEFAULT_GOAL := serve
.NOTPARALLEL:
.PHONY: help serve ray test test-full test-gpu check format bench bench-kernels bench-peers prove compare docs-compare docs-policies docs-pictures accept soak gpu-kernels gpu-build lock audit release model models vocabs native wheels clean

help: ## what there is: `make serve` and `make test` are all a newcomer needs
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(VENV)/.core ## install, fetch the model, serve on 127.0.0.1:8000
	$(BIN)/pageturner serve $(MODEL) --page-settings $(ARGS)

ray: $(VENV)/.core ## the same by Ray Serve, with replicas that come and go: examples/ray.toml
	$(BIN)/pip install -q "ray[serve]>=2.60,<2.61"
	$(BIN)/pageturner deploy examples/ray.toml $(ARGS)

test: $(VENV)/.dev ## unit and server tests, no network: three to five minutes on two cores
	$(PYTEST) -n $(WORKERS) --dist worksteal $(ARGS)

test-full: $(VENV)/.dev gpu-build model models vocabs ## what `make test` leaves out: slow tests and those on real models
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "(slow or model) and not peer and not gpu and not soak" $(ARGS)

check: $(VENV)/.dev ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)

format: $(VENV)/.dev ## mend what `make check` would complain about
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(NATIVE)

bench: $(VENV)/.dev model ## time per step and tokens per second of this machine
	$(BIN)/pageturner bench engine --model $(MODEL) $(ARGS)

bench-kernels: $(VENV)/.dev ## each operator beside the machine's limits and the commit BASE, compiled for it
	$(BIN)/python bench/kernels_against.py $(BASE) $(ARGS)

bench-peers: $(VENV)/.dev model ## beside llama-server, vLLM, OpenVINO GenAI and Transformers (bench/peers/setup.sh)
	$(BIN)/python bench/peers/run.py $(ARGS)

prove: $(VENV)/.dev model ## seven claims put to ours and to the peers that are installed, or to --server NAME=URL: bench/PROVE.md
	$(BIN)/python bench/prove.py $(ARGS)

compare: $(VENV)/.core model ## static and continuous batching on this machine, as pictures: compare.html, in about a minute
	$(BIN)/pageturner compare $(MODEL) $(ARGS)

docs-compare: $(VENV)/.core model ## the pictures and figures of docs/compare.md, measured anew: on a quiet machine, half an hour (ROUNDS=1: a quarter)
	$(BIN)/pageturner compare $(MODEL) --num-prompts 64 --orders fcfs,sjf --rounds $(ROUNDS) --pictures docs/compare/mixed --output build/compare/mixed.html
	$(BIN)/pageturner compare $(MODEL) --mix stalls --max-num-batched-tokens 128 --rounds $(ROUNDS) --pictures docs/compare/stalls --output build/compare/stalls.html
	$(BIN)/pageturner compare $(MODEL) --mix tenants --num-prompts 95 --policies chunked --orders fcfs,fair --max-num-seqs 8 --rounds $(ROUNDS) --pictures docs/compare/tenants --output build/compare/tenants.html
	for each in conv-3 code-2; do trace=$${each%-*}; \
	  $(BIN)/pageturner compare $(MODEL) --trace $(TRACES)/azure2023_$$trace.jsonl.gz --num-prompts 64 --length-scale 0.25 --rate $${each#*-} --rounds $(ROUNDS) --pictures docs/compare/$$trace --output build/compare/$$trace.html || exit 1; \
	done

docs-policies: $(VENV)/.core ## the pictures of docs/policies.md anew, simulated: the same on every machine, in seconds
	$(BIN)/python bench/policies.py

docs-pictures: $(VENV)/.dev model ## the animated picture of the README and those of the page, anew: on a quiet machine, in two minutes
	$(BIN)/python bench/docs_pictures.py $(ARGS)

accept: $(VENV)/.dev model ## every line a piece of work must show: make accept NAME=smaller
	$(BIN)/python bench/accept/$(NAME).py $(ARGS)

soak: $(VENV)/.dev model ## long runs, by hand: whole cross products, kernels under sanitizers, random plans, hostile files and frames, a million requests, kill -9
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "soak and not peer and not gpu" --timeout 7200
	$(BIN)/python tests/native/run.py
	PAGETURNER_PROPERTY_RUNS=20000 $(BIN)/pytest -n $(WORKERS) -m slow tests/scheduler --timeout 3600
	$(BIN)/python bench/fuzz_files.py --seconds 600
	$(BIN)/python bench/fuzz_frames.py --seconds 600
	$(BIN)/python bench/accept/trust_soak.py
	$(BIN)/python bench/accept/trust2.py --only chaos --chaos-minutes 5 $(ARGS)

test-gpu: gpu-build ## the GPU kernels by the interpreter of Triton: no GPU is needed, it takes long
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "slow or not slow" tests/gpu $(ARGS)

gpu-kernels: $(VENV)/.gpu-build ## compile the GPU kernels for every architecture: no GPU is needed, some minutes
	$(BIN)/python bench/gpu/compile_kernels.py $(ARGS)

native: $(VENV)/.core ## compile the kernels again, after a compiler was installed; ISAS=all: of every instruction set
	$(PYTHON) setup/install.py $(VENV) --again --isas $(ISAS)

wheels: $(VENV)/.core ## what installs without a compiler, into dist/: wheels for x86-64 and aarch64, and the sdist (docs/install.md)
	$(BIN)/python bench/wheels/build.py $(ARGS)

lock: $(VENV)/.release # versions and hashes anew, of what pyproject.toml asks for
	(head -1 requirements.txt; $(BIN)/uv pip compile --upgrade --universal --generate-hashes --python-version 3.11 --no-header --no-annotate -q pyproject.toml) > requirements.new
	mv requirements.new requirements.txt

audit: $(VENV)/.release # known vulnerabilities of what is pinned; a registry that tells of none makes a line for each
	$(BIN)/pip-audit --require-hashes --disable-pip -r requirements.txt

release: wheels audit ## what docs/release.md signs, into dist/: wheels, bill of materials, checksums; KEY=path of an SSH key
	$(BIN)/cyclonedx-py requirements requirements.txt --pyproject pyproject.toml --output-reproducible -o dist/sbom.cdx.json
	cd dist && sha256sum *.whl *.tar.gz sbom.cdx.json > SHA256SUMS
	test -z "$(KEY)" || ssh-keygen -Y sign -n file -f "$(KEY)" dist/SHA256SUMS

model: $(VENV)/.core
	$(BIN)/pageturner pull $(MODEL)

gpu-build: $(VENV)/.dev # Triton and cuda-bindings, 197 MB; without them the tests of the GPU kernels are skipped, with a reason
	-test -f $(VENV)/.gpu-build || $(MAKE) $(VENV)/.gpu-build

models: $(VENV)/.core # 0.7 GB that only tests use; without them these are skipped, with a reason
	-$(BIN)/python tests/tools/fetch_models.py

vocabs: $(VENV)/.core # without them the tests of foreign tokenizers are skipped, with a reason
	-$(BIN)/python tests/tools/record_vocabs.py --fetch
	-$(BIN)/python tests/tools/record_vocabs.py --templates

# Kernels of this processor's best instruction set; without a compiler the numpy reference is installed alone.
$(VENV)/.core: $(SOURCES)
	$(PYTHON) setup/install.py $(VENV)
	touch $@

# Tests want the kernels of every instruction set.
$(VENV)/.every-isa: $(SOURCES)
	$(PYTHON) setup/install.py $(VENV) --isas all
	touch $@ $(VENV)/.core

$(VENV)/.dev: $(VENV)/.every-isa
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --group dev
	touch $@

$(VENV)/.release: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --group release
	touch $@

$(VENV)/.gpu-build: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --group gpu-build
	touch $@

clean:
	rm -rf build $(VENV)
