#!/usr/bin/env bash
# Installs those Debian packages of the named groups of packages.txt that are missing. Where nothing
# is missing it needs neither root nor a network.
# usage: install_packages.sh GROUP...
set -euo pipefail
list=$(dirname "$0")/packages.txt

missing=()
for group in "$@"; do
  for package in $(sed -n "s/^$group: //p" "$list"); do
    state=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
    [[ $state == installed ]] || missing+=("$package")
  done
done
[[ ${#missing[@]} -gt 0 ]] || exit 0

if ! command -v apt-get >/dev/null; then
  echo "missing, and there is no apt-get to install them: ${missing[*]}" >&2
  exit 1
fi
as_root=()
[[ $(id -u) -eq 0 ]] || as_root=(sudo)
echo "installing ${missing[*]}"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
