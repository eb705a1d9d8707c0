#!/usr/bin/env bash
# Prints the lines of each room, and exits with 1 if one has more than its budget in scripts/size.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 0 ] || { echo "size.sh: it takes no options" >&2 && exit 2; }

over=0
printf '%-10s %7s %7s\n' room lines budget
while read -r room budget paths; do
  [[ "$room" == "#"* ]] && continue
  # shellcheck disable=SC2086
  lines=$(git ls-files -- $paths | grep -E '\.(h|cuh|cu|cpp|js|css|html)$' | tr '\n' '\0' | xargs -0 cat | wc -l)
  printf '%-10s %7d %7d\n' "$room" "$lines" "$budget"
  if [ "$lines" -gt "$budget" ]; then
    echo "size.sh: $room is over its budget; make it smaller, or say in scripts/size.txt's commit why it grows" >&2
    over=1
  fi
done < scripts/size.txt
exit $over
