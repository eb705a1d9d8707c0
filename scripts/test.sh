#!/usr/bin/env bash
# Sets up, builds, and runs all tests: first the release build, then the same suite under AddressSanitizer and UBSan.
#   scripts/test.sh              everything
#   scripts/test.sh release      the release build only
#   scripts/test.sh sanitize     the sanitizer build only
set -euo pipefail
cd "$(dirname "$0")/.."

presets=("${@:-}")
[ -n "${presets[0]}" ] || presets=(release sanitize)
for preset in "${presets[@]}"; do
  case "$preset" in
    release | debug | sanitize) ;;
    *) echo "test.sh: no build is called \"$preset\"; use release, debug or sanitize" >&2 && exit 2 ;;
  esac
done

scripts/setup.sh
for preset in "${presets[@]}"; do
  echo "== $preset: build"
  cmake --preset "$preset" -DSTREAMBP_TESTS=ON > /dev/null
  cmake --build --preset "$preset" -j "$(nproc)"
  echo "== $preset: test"
  ctest --preset "$preset" -j "$(nproc)" --no-tests=error
done
