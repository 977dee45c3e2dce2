#!/bin/sh
# Rewrites constraints.txt for one end of the supported range of jax: constraints_for.sh pinned|oldest|newest
#
# oldest: the lower bounds of jax, the libraries around it and Ray in pyproject.toml; newest: none of them is pinned, so pip
# takes the newest in range.
set -eu
file=$(cd "$(dirname "$0")/.." && pwd)/constraints.txt
project=$(dirname "$file")/pyproject.toml
lower() { sed -n "s/^ *\"$1>=\([0-9.]*\).*/\1/p" "$project" | head -n 1; }

case "${1:-}" in
pinned) exit 0 ;;
oldest | newest) ;;
*) echo "usage: constraints_for.sh pinned|oldest|newest" >&2 && exit 2 ;;
esac
libraries="jax flax optax orbax-checkpoint grain tensorstore ray"
kept=$(grep -vE "^(jaxlib|libtpu|$(echo "$libraries" | tr ' ' '|'))==" "$file")
printf '%s\n' "$kept" >"$file"
if [ "$1" = oldest ]; then
    printf 'jaxlib==%s\n' "$(lower jax)" >>"$file"
    for library in $libraries; do printf '%s==%s\n' "$library" "$(lower "$library")" >>"$file"; done
fi
