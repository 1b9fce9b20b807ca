#!/usr/bin/env bash
# Compares the C symbols of a shared library with the list in the tree, and checks that every other
# exported symbol belongs to namespace sparsemla.
# usage: exported_symbols.sh LIBRARY LIST
set -euo pipefail
symbols=$(nm -D --defined-only --demangle "$1" | cut -d ' ' -f 3-)
diff <(grep '^sparsemla_' <<<"$symbols" | LC_ALL=C sort) "$2" || {
  echo "the C ABI of $1 (<) differs from $2 (>)"
  exit 1
}
foreign=$(grep -vE '^(sparsemla_|sparsemla::|(vtable|typeinfo|typeinfo name) for sparsemla::)' \
  <<<"$symbols" || true)
[[ -z "$foreign" ]] || {
  echo "symbols that are not ours are exported:"
  echo "$foreign"
  exit 1
}
