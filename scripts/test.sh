#!/usr/bin/env bash
# Sets up, builds, and runs all tests.
#   scripts/test.sh              the release build
#   scripts/test.sh --all        also everything else that a change must pass: the formatting, budgets of lines, the tests under
#                                AddressSanitizer and UBSan, the GPU code if there is nvcc, the fingerprints, a short run
#   scripts/test.sh sanitize     the sanitizer build only
#   scripts/test.sh debug        a build for a debugger, with assertions in the standard library
# The build shows its percentage, and the tests their number and how many there are.
set -euo pipefail
cd "$(dirname "$0")/.."

section() { printf '== %s (after %d min)\n' "$1" $((SECONDS / 60)); }

times=()
build_and_test() { # PRESET [OPTIONS FOR CMAKE...] [-- OPTIONS FOR CTEST...]
  local preset=$1 options=(-DSTREAMBP_TESTS=ON -DSTREAMBP_WERROR=ON) begin=$SECONDS built
  shift
  while [ $# -gt 0 ] && [ "$1" != -- ]; do options+=("$1") && shift; done
  [ $# -eq 0 ] || shift
  section "$preset: build"
  cmake --preset "$preset" "${options[@]}" | grep '^-- [A-Za-z]*: '
  cmake --build --preset "$preset" -j "$(nproc)"
  built=$SECONDS
  section "$preset: test"
  # As many tests as cores run side by side, so each has one thread; tests of threads set their number.
  OMP_NUM_THREADS=1 ctest --preset "$preset" -j "$(nproc)" --no-tests=error "$@"
  times+=("$preset: built in $((built - begin)) s, tested in $((SECONDS - built)) s")
}

everything() {
  if command -v clang-format > /dev/null; then
    section "formatting"
    git ls-files '*.cu' '*.cuh' '*.cpp' '*.h' | xargs clang-format --dry-run -Werror
  fi
  section "lines"
  scripts/size.sh
  build_and_test release -DSTREAMBP_CUDA=OFF
  build_and_test sanitize
  if command -v nvcc > /dev/null; then
    local log=build/kernel_resources.log
    scripts/kernel_resources.sh 80 90 > $log 2>&1 & # beside nvcc, which keeps one core busy
    local resources=$!
    trap "kill $resources 2> /dev/null || true" EXIT
    build_and_test release -DSTREAMBP_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90-virtual -- -L gpu # the rest is built and tested already; ptxas runs above
    section "kernels"
    wait $resources || { cat $log && exit 1; }
    cat $log
  fi
  section "the same bits on other processors"
  scripts/fingerprints.sh --quick
  section "a short run"
  build/streambp verify --oracle
  build/streambp train --steps 5 --sample 40 --out "$(mktemp -d)/run"
}

[ $# -le 1 ] || { echo "test.sh: it takes one argument" >&2 && exit 2; }
case "${1:-release}" in
  release | debug | sanitize) scripts/setup.sh && build_and_test "${1:-release}" ;;
  --all) scripts/setup.sh && everything ;;
  *) echo "test.sh: unknown argument \"$1\"; use --all, release, sanitize or debug" >&2 && exit 2 ;;
esac
printf '== %s\n' "${times[@]}"
