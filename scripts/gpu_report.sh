#!/usr/bin/env bash
# Writes a report on correctness and speed on a GPU, in at most 30 minutes: all GPU tests, some of them also under
# compute-sanitizer, memory against the plan, the speed of models and of single operations, and a comparison with PyTorch.
#   scripts/gpu_report.sh [OUT]        writes OUT/report.md, report.json and whole logs (default: gpu-report)
# Run it in a folder made by scripts/bundle.sh, or in a checkout built with CUDA; if that lacks the tests, it builds them first.
set -uo pipefail
. "$(dirname "$0")/gpu_steps.sh"

case "${1:-gpu-report}" in
  -*) sed -n '2,5s/^# //p' "$0" >&2 && exit 2 ;;
esac
if top=$(dirname "$0")/.. && [ -e "$top/build/CMakeCache.txt" ] && [ ! -x "$top/build/test_gpu" ] && [ ! -d "$top/bin" ]; then
  cmake -S "$top" -B "$top/build" -DSTREAMBP_TESTS=ON > /dev/null && cmake --build "$top/build" -j "$(nproc)" --target streambp test_gpu || exit 2
fi
begin "${1:-gpu-report}" 1800

if ! step first 60 "$bin/streambp" verify --device cuda --length 300 --tile 256; then
  cat "$work/logs/first.log" >&2
  echo "gpu_report.sh: the program does not run on this machine's GPU; see its message above" >&2
  exit 2
fi

# Correct
step devices 30 "$bin/streambp" devices
step verify 90 "$bin/streambp" verify --device cuda
gpu_tests tests 4 400 '*'
if command -v compute-sanitizer > /dev/null; then
  for tool in memcheck racecheck initcheck; do sanitize $tool 120; done
fi

# Fast
for heads in "32 128" "64 64" "16 256"; do
  bench "layer-of-${heads#* }" 60 $(qwen3 8B 1 $heads) --length 16384 --mode full stream --repeat 3 --profile
done
bench adamw 60 --model qwen3-0.6b --length 2048 --mode stream --repeat 3 --profile
bench qwen3-0.6b 150 --model qwen3-0.6b --length 8192 32768 --optimizer none --mode checkpoint stream --chunk 4096 --repeat 2
bench qwen3-0.6b-long 150 --model qwen3-0.6b --length 131072 --optimizer none --mode stream --chunk 4096 --repeat 1
bench qwen3-4b 200 --model qwen3-4b --length 6144 12288 18432 24576 27648 --optimizer none --mode checkpoint stream --chunk 4096 --repeat 2
bench qwen3-8b 150 --model qwen3-8b --length 8192 32768 --optimizer none --mode stream --chunk 4096 --repeat 1
if python3 -c 'import torch, transformers' 2> "$work/logs/python.log"; then
  step torch-attention 60 python3 scripts/torch_jobs.py '{"do": "attention", "length": 16384, "widths": [64, 128, 256]}'
  step compare-torch 300 python3 scripts/compare_torch.py --streambp "$bin/streambp" --model qwen3-0.6b --length 8192 32768 \
    --chunk 4096 --limit 60 --json "$work/bench/compare-torch.json"
else
  printf 'compare-torch\tnot run: %s\t0\n' "$(tail -1 "$work/logs/python.log")" >> "$work/steps"
fi

finish
code=$?
{
  printf '# GPU report\n\n```\n' && cat "$out/summary.txt" && printf '```\n'
  while IFS=$'\t' read -r name said seconds; do
    [ -e "$work/logs/$name.log" ] || continue
    printf '\n## %s: %s (%s s)\n\n```\n' "$name" "$said" "$seconds"
    grep -v -e '^\[ RUN' -e '^\[---' -e '^Running main' -e 'Global test environment' -e '^\[       OK' "$work/logs/$name.log" | tail -80 | cut -c 1-200
    printf '```\n'
  done < "$work/steps"
} > "$out/report.md"
python3 - "$work" > "$out/report.json" << 'END' || rm -f "$out/report.json"
import json, pathlib, sys
work = pathlib.Path(sys.argv[1])
steps = [dict(zip(("step", "outcome", "seconds"), line.split("\t"))) for line in open(work / "steps").read().splitlines()]
for step in steps:
    result = work / "bench" / f"{step['step']}.json"
    if result.exists():
        step["result"] = json.loads(result.read_text())
json.dump({"summary": (work / "logs/devices.log").read_text(), "steps": steps}, sys.stdout, indent=1)
END
echo "written: $out/report.md and $out/report.json"
exit $code
