#!/usr/bin/env bash
# The C++ block of README.md is the marked part of examples/decode.cc, indentation apart.
# usage: readme_example.sh README.md decode.cc
set -euo pipefail
shown=$(sed -n '/^```cpp$/,/^```$/p' "$1" | sed '1d;$d')
compiled=$(sed -n '/\/\/ \[README\]/,/\/\/ \[README\]/p' "$2" | sed '1d;$d' | sed 's/^  //')
[[ -n "$compiled" ]] || { echo "no marked part in $2"; exit 1; }
diff <(echo "$shown") <(echo "$compiled") || { echo "$1 (<) differs from $2 (>)"; exit 1; }
