#!/usr/bin/env bash
# Training a part of a model, from a fresh clone, on the CPU: trains a small model on stories, then teaches it to answer
# questions in four ways that need less and less memory. Takes a few minutes and replaces out/demo-lora.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
cmake --preset release > /dev/null
cmake --build --preset release --target streambp -j "$(nproc)"
export CUDA_VISIBLE_DEVICES=  # the CPU is faster for a model this small
out=out/demo-lora
rm -rf "$out"
mkdir -p "$out"

printf '\n== Train a model on stories\n\n'
build/streambp train --steps 300 --sample 0 --out "$out/base"
build/streambp examples answers --count 3000 --out "$out/answers.jsonl"

tune() {
  name=$1
  shift
  printf '\n== %s: %s\n\n' "$name" "$*"
  build/streambp train --model "$out/base" --data "$out/answers.jsonl" --length 768 --chunk 256 --eval-every 20 \
    --out "$out/$name" "$@"
}
tune full --rate 4e-3
tune blocks --rate 4e-3 --blocks 1 --block-steps 10
tune lora --rate 8e-3 --lora 8
tune lora-nf4 --rate 8e-3 --lora 8 --base nf4

printf '\n== The adapters become part of the model\n\n'
build/streambp merge --adapter "$out/lora" --out "$out/merged"
build/streambp generate --model "$out/merged" --prompt 'Tom left the red kite by the pond. Where was the red kite? ' \
  --temperature 0 --length 60
printf '\n== The four runs in one page\n\n'
build/streambp report "$out"/{full,blocks,lora,lora-nf4} --html "$out/comparison.html"
