#!/bin/sh
# Builds the native module and puts it where this checkout imports it, in one move, only if it imports.
# Usage: build.sh [build directory] [cmake options, e.g. -DPAGETURNER_SANITIZE=address,undefined]; $PYTHON: interpreter.
set -eu
root=$(cd "$(dirname "$0")/../../../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
build=${1:-$root/build/native}
[ $# -gt 0 ] && shift
generator=$(command -v ninja >/dev/null && echo "-G Ninja" || true)
cmake -S "$root" -B "$build" $generator -DPython_EXECUTABLE="$python" "$@" >/dev/null
cmake --build "$build"
for so in "$build"/_native.*so; do
  cp "$so" "$root/src/pageturner/kernels/.$$.so"
  mv "$root/src/pageturner/kernels/.$$.so" "$root/src/pageturner/kernels/$(basename "$so")"
done
PYTHONPATH="$root/src" "$python" -c 'from pageturner.kernels.cpu.native_module import available_isas; print(available_isas())'
