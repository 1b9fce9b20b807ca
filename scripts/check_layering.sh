#!/usr/bin/env bash
# Who may include what, and what may not be said where: the table of docs/design.md as code. Prints
# every breach and fails if there is one.
set -euo pipefail
cd "$(dirname "$0")/.."
breaches=0

report() {  # TITLE, lines
  [[ -z $2 ]] || { echo "$1:"; sed 's/^/  /' <<<"$2"; breaches=1; }
}

# Quoted includes of the files are only those of the pattern.
may_include() {  # PATTERN FILES...
  local pattern=$1
  shift
  report "includes outside '$pattern'" \
    "$(grep -nE '^#include "' "$@" /dev/null | grep -vE "#include \"($pattern)" || true)"
}

# The pattern does not occur in the code of the files; comments do not count.
must_not_say() {  # PATTERN FILES...
  local pattern=$1
  shift
  report "'$pattern' is not allowed" \
    "$(grep -nE "$pattern" "$@" /dev/null | grep -vE ':[0-9]+: *(//|\*|/\*)' | \
       grep -vE "//.*($pattern)" || true)"
}

sources() { git ls-files -- "$@" | grep -E '\.(cc|h|inc|c)$'; }

public='sparsemla/'
factories='plan/row_lengths\.h|cpu/cpu_backend\.h|ref/ref_backend\.h|capi_structs\.h'
may_include "$public" $(sources include)
may_include "$public|core/|$factories" $(sources 'src/*.cc' 'src/*.h' | grep -E '^src/[^/]*$')
may_include "$public|core/" $(sources src/core)
may_include "$public|core/|plan/" $(sources src/plan)
may_include "$public|core/|plan/|ref/" $(sources src/ref)
may_include "$public|core/|plan/|cpu/" $(sources src/cpu)
may_include "$public|trace/|core/(require|numeric)\.h" $(sources src/trace)
may_include "$public|trace/|tools/|core/(require|numeric)\.h" $(sources tools)

library=$(sources include src | grep -v '^src/trace/')
must_not_say '\b(throw|abort|exit|printf|puts|fprintf)\b *\(?|std::c(out|err)\b' $library
must_not_say 'intrin\.h|arm_neon\.h' $(grep -v '^src/cpu/attention_' <<<"$library")
must_not_say 'core/softmax_state\.h|<thread>|<atomic>' $(sources src/ref)
must_not_say '\b(float|double|getenv)\b|<chrono>' $(sources src/plan)
must_not_say '\bgetenv\b' $(grep -v '^src/backend\.cc' <<<"$library")

report 'files of more than 600 lines' "$(git ls-files | grep -E '\.(c|cc|h|inc|sh|cmake|txt)$' |
  xargs wc -l | awk '$2 != "total" && $1 > 600 {print $2 ": " $1}')"
report 'paths of one machine' \
  "$(git grep -nE '/(work|root|home)/[a-z]' -- ':!scripts/check_layering.sh' || true)"
report 'unfinished work' \
  "$(git grep -nE '\b(TODO|FIXME|XXX)\b' -- ':!scripts/check_layering.sh' || true)"
exit $breaches
