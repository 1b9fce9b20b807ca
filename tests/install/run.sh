#!/usr/bin/env bash
# Installs a build tree into an empty folder, builds the consumer against it and runs it.
# usage: run.sh BUILD_DIR WORK_DIR CMAKE [CMAKE_ARGUMENT...]
set -euo pipefail
build=$1 work=$(realpath -m "$2") cmake=$3
shift 3
source=$(cd "$(dirname "$0")" && pwd)
rm -rf "$work"
"$cmake" --install "$build" --prefix "$work/prefix" >/dev/null
[[ ! -x $work/prefix/bin/sparsemla ]] || "$work/prefix/bin/sparsemla" info  # finds its library
"$cmake" -S "$source" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_PREFIX_PATH="$work/prefix" "$@"
"$cmake" --build "$work/build"
"$(dirname "$cmake")/ctest" --test-dir "$work/build" --output-on-failure --no-tests=error
