#!/usr/bin/env bash
# From a clean clone to a trained sample: sets up, builds, proves the gradient exact, trains for about a minute, samples.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
cmake --preset release > /dev/null
cmake --build --preset release --target streambp -j "$(nproc)"
printf '\n== The gradient: StreamBP against full memory, bit for bit\n\n'
build/streambp verify --reference
printf '\n== Training\n\n'
build/streambp train
