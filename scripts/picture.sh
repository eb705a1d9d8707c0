#!/usr/bin/env bash
# Takes a picture of the top of a page, for docs/. Needs Chromium (apt-get install chromium).
#   scripts/picture.sh PAGE.html WIDTH HEIGHT PICTURE.png
#   scripts/picture.sh step.html#3:0.62 1240 1870 docs/step.png      the step at 62% of the fourth way
set -euo pipefail
[ $# -eq 4 ] || { sed -n '2,4s/^# \{0,1\}//p' "$0" >&2 && exit 2; }
page=$1 fragment=
[ -f "$page" ] || { page=${1%#*} && fragment=${1#"$page"}; }
[ -f "$page" ] || { echo "picture.sh: $page: no such page" >&2 && exit 2; }
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) ||
  { echo "picture.sh: no Chromium; apt-get install chromium" >&2 && exit 2; }
address=file://$(realpath "$page" | sed 's/%/%25/g; s/#/%23/g; s/?/%3f/g; s/ /%20/g')$fragment
sandbox=()
[ "$(id -u)" -ne 0 ] || sandbox=(--no-sandbox) # Chromium's sandbox does not work for root
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
"$browser" --headless "${sandbox[@]}" --disable-gpu --hide-scrollbars "--user-data-dir=$temporary/profile" "--window-size=$2,$3" \
  "--screenshot=$temporary/picture.png" "$address" 2> "$temporary/log" ||
  { cat "$temporary/log" >&2 && exit 1; }
mv "$temporary/picture.png" "$4"
