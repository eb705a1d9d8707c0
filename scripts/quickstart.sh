#!/usr/bin/env bash
# From a fresh clone to a trained sample: install what is missing, build, verify the gradient, train for two minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

section() { printf '\n== %s\n\n' "$1"; }

section "Setup"
scripts/setup.sh
cmake --preset release | grep '^-- [A-Za-z]*: ' # what is built, and why

section "Compiling: about a minute and a half on two cores, more for a GPU; once"
cmake --build --preset release --target streambp -j "$(nproc)"
section "The gradient: StreamBP against full-memory backpropagation, bit for bit"
build/streambp verify --oracle
section "Training"
build/streambp train
