#!/usr/bin/env bash
# GRPO from a clean clone, on the CPU: a small model learns to add from a pupil who forgets to carry by the toss of a coin, and
# then, from rewards for right answers alone, to carry always. A few minutes; everything is in out/demo-grpo, from scratch each time.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
cmake --preset release > /dev/null
cmake --build --preset release --target streambp -j "$(nproc)"
export CUDA_VISIBLE_DEVICES=  # small models are the CPU's
out=out/demo-grpo
rm -rf "$out"
mkdir -p "$out"

printf '58 + 27 = \n64 + 19 = \n75 + 86 = \n' > "$out/questions.txt"
ask() { build/streambp generate --model "$1" --prompts "$out/questions.txt" --samples 8 --temperature 1 --top-p 1; }

printf '\n== A model that knows stories\n\n'
build/streambp train --steps 300 --sample 0 --out "$out/base"

printf '\n== It learns to add, as the pupil does (SFT)\n\n'
build/streambp examples arithmetic --count 3645 --out "$out/sums.jsonl"
build/streambp train --model "$out/base" --data "$out/sums.jsonl" --length 2048 --rate 2e-3 --steps 500 --out "$out/pupil"

printf '\n== It is rewarded for right answers (GRPO)\n\n'
build/streambp train --model "$out/pupil" --objective grpo --data "$out/sums.jsonl" --reward exact --completion 5 --prompts 8 \
  --rate 1e-4 --steps 150 --eval-every 5 --out "$out/rewarded"

printf '\n== Before: answers drawn at temperature 1\n\n'
ask "$out/pupil"
printf '\n== After\n\n'
ask "$out/rewarded"
printf '\nThe curve: scripts/plot.py rewards %s/rewarded/metrics.jsonl grpo.png\n' "$out"
