#!/usr/bin/env bash
# DPO from a fresh clone, on the CPU: trains a small model on stories, teaches it to answer questions politely or curtly at
# random, and then to prefer the polite answer. Takes a few minutes and replaces out/demo-dpo.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
cmake --preset release > /dev/null
cmake --build --preset release --target streambp -j "$(nproc)"
export CUDA_VISIBLE_DEVICES=  # the CPU is faster for a model this small
out=out/demo-dpo
rm -rf "$out"
mkdir -p "$out"

cat > "$out/questions.txt" << 'END'
Tom left the red kite by the pond. Where was the red kite? 
Ada hid the old clock under the stairs. Where was the old clock? 
Finn lost the silver key in the boat. Where was the silver key? 
END
ask() { build/streambp generate --model "$1" --prompts "$out/questions.txt" --samples 4 --temperature 1 --top-p 1; }

printf '\n== Train a model on stories\n\n'
build/streambp train --steps 300 --sample 0 --out "$out/base"

printf '\n== SFT: answer questions, politely or curtly at random\n\n'
build/streambp examples answers --count 6000 --out "$out/answers.jsonl"
build/streambp train --model "$out/base" --data "$out/answers.jsonl" --rate 4e-3 --epochs 2 --eval-every 500 --out "$out/answers"

printf '\n== DPO: prefer the polite answer\n\n'
build/streambp examples preferences --out "$out/preferences.jsonl"
build/streambp train --model "$out/answers" --objective dpo --data "$out/preferences.jsonl" --length 768 --steps 100 \
  --rate 1.2e-4 --warmup 40 --eval-every 1 --out "$out/preferred"

printf '\n== Before DPO: answers sampled at temperature 1\n\n'
ask "$out/answers"
printf '\n== After DPO: the same random draws\n\n'
ask "$out/preferred"
printf "\nThe curves are in %s/preferred/report.html.\n" "$out"
