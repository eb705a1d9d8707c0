#!/usr/bin/env bash
# Sets up, builds, and runs all tests: first the release build, then the same tests under AddressSanitizer and UBSan.
#   scripts/test.sh              everything, 20 to 40 minutes on two cores
#   scripts/test.sh release      the release build only
#   scripts/test.sh sanitize     the sanitizer build only
#   scripts/test.sh debug        a build for a debugger, with assertions in the standard library
set -euo pipefail
cd "$(dirname "$0")/.."

presets=("$@")
[ $# -gt 0 ] || presets=(release sanitize)
for preset in "${presets[@]}"; do
  case "$preset" in
    release | debug | sanitize) ;;
    *) echo "test.sh: unknown build \"$preset\"; use release, debug or sanitize" >&2 && exit 2 ;;
  esac
done

scripts/setup.sh
times=()
for preset in "${presets[@]}"; do
  echo "== $preset: build"
  begin=$SECONDS
  cmake --preset "$preset" -DSTREAMBP_TESTS=ON > /dev/null
  cmake --build --preset "$preset" -j "$(nproc)"
  built=$SECONDS
  echo "== $preset: test"
  ctest --preset "$preset" -j "$(nproc)" --no-tests=error
  times+=("$preset: built in $((built - begin)) s, tested in $((SECONDS - built)) s")
done
printf '== %s\n' "${times[@]}"
