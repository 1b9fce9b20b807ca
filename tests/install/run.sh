#!/usr/bin/env bash
# Installs a build tree into an empty folder, builds the consumer against it and runs it.
# usage: run.sh BUILD_DIR WORK_DIR CMAKE C_COMPILER CXX_COMPILER
set -euo pipefail
build=$1 work=$2 cmake=$3 cc=$4 cxx=$5
source=$(cd "$(dirname "$0")" && pwd)
rm -rf "$work"
"$cmake" --install "$build" --prefix "$work/prefix" >/dev/null
"$cmake" -S "$source" -B "$work/build" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" \
  -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_BUILD_TYPE=Release
"$cmake" --build "$work/build"
"$(dirname "$cmake")/ctest" --test-dir "$work/build" --output-on-failure
