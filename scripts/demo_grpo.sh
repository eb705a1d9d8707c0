#!/usr/bin/env bash
# GRPO from a fresh clone, on the CPU: a small model learns to add from examples that forget the carry half the time, and then
# learns from rewards for right answers to always carry. Takes a few minutes and replaces out/demo-grpo.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
cmake --preset release > /dev/null
cmake --build --preset release --target streambp -j "$(nproc)"
export CUDA_VISIBLE_DEVICES=  # the CPU is faster for a model this small
out=out/demo-grpo
rm -rf "$out"
mkdir -p "$out"

printf '58 + 27 = \n64 + 19 = \n75 + 86 = \n' > "$out/questions.txt"
ask() { build/streambp generate --model "$1" --prompts "$out/questions.txt" --samples 8 --temperature 1 --top-p 1; }

printf '\n== Train a model on stories\n\n'
build/streambp train --steps 300 --sample 0 --out "$out/base"

printf '\n== SFT: learn to add from examples that forget the carry half the time\n\n'
build/streambp examples arithmetic --count 3645 --out "$out/sums.jsonl"
build/streambp train --model "$out/base" --data "$out/sums.jsonl" --length 2048 --pack 2048 --rate 2e-3 --steps 500 --out "$out/sft"

printf '\n== GRPO: reward right answers\n\n'
build/streambp train --model "$out/sft" --objective grpo --data "$out/sums.jsonl" --reward exact --completion 5 --prompts 8 \
  --rate 1e-4 --steps 150 --eval-every 5 --out "$out/rewarded"

printf '\n== Before GRPO: answers sampled at temperature 1\n\n'
ask "$out/sft"
printf '\n== After GRPO\n\n'
ask "$out/rewarded"
printf "\nThe curves and completions are in %s/rewarded/report.html.\n" "$out"
