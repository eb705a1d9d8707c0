#!/usr/bin/env bash
# Writes a report on correctness and speed on a GPU, in nine minutes: tests, the same tests under compute-sanitizer,
# memory against the plan, the speed of models and of single operations, and a comparison with PyTorch.
#   scripts/gpu_report.sh [OUT]        writes OUT/report.md and OUT/report.json (default: gpu-report)
# Run it in a folder made by scripts/bundle.sh, or in a checkout built with CUDA; if that lacks the tests, it builds them first.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

case "${1:-gpu-report}" in
  -*) sed -n '2,5s/^# //p' "$0" >&2 && exit 2 ;;
esac
out=${1:-gpu-report}
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
bin=build
[ -d bin ] && bin=bin
if [ -e build/CMakeCache.txt ] && [ ! -x "$bin/test_gpu" ]; then
  cmake -S . -B build -DSTREAMBP_TESTS=ON > /dev/null && cmake --build build -j "$(nproc)" --target streambp test_gpu || exit 2
fi
for program in streambp test_gpu; do
  [ -x "$bin/$program" ] || { echo "gpu_report.sh: $bin/$program is missing; build it with CUDA, or run in a bundle" >&2 && exit 2; }
done
bin=$(cd "$bin" && pwd)
export STREAMBP_BINARY=$bin/streambp STREAMBP_SOURCE=$PWD

# Libraries: first those of the bundle, then CUDA's, including those installed by pip.
libraries=$PWD/lib
for folder in /usr/local/cuda/lib64 $(python3 -c 'import nvidia, os; print(*(os.path.join(p, d, "lib") for p in nvidia.__path__ for d in sorted(os.listdir(p))))' 2> /dev/null); do
  [ -d "$folder" ] && libraries=$libraries:$folder
done
export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
if ! "$bin/streambp" verify --device cuda --length 300 --tile 256 > "$out/first.txt" 2>&1; then
  cat "$out/first.txt" >&2
  echo "gpu_report.sh: the program does not run on this machine's GPU; see its message above" >&2
  exit 2
fi

report=$out/report.md json=$out/report.json.partial start=$SECONDS failures=0
budget=500 # seconds for all of it
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null | head -1)
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -1)
commit=$(cat commit 2> /dev/null || git rev-parse HEAD 2> /dev/null || echo unknown)
cat > "$report" << END
# GPU report

$(date -u +%Y-%m-%d), $gpu, driver $driver, commit $commit. Made by \`scripts/gpu_report.sh\`.

END
printf '{"date": "%s", "gpu": "%s", "driver": "%s", "commit": "%s", "steps": [\n' "$(date -u +%Y-%m-%d)" "$gpu" "$driver" "$commit" > "$json"
separator=""

section() { printf '## %s\n\n' "$1" >> "$report"; }

# step NAME SECONDS COMMAND...: runs the command with this time limit and adds the end of its output to the report.
step() {
  local name=$1 limit=$2 code began=$SECONDS
  shift 2
  local left=$((budget - (SECONDS - start)))
  if [ $left -lt 5 ]; then
    printf '### %s\n\nSkipped: no time left.\n\n' "$name" >> "$report"
    printf '%s{"step": "%s", "left_out": true}' "$separator" "$name" >> "$json"
    separator=$',\n'
    return
  fi
  [ "$limit" -le $left ] || limit=$left
  echo "== $name"
  timeout "$limit" "$@" > "$out/step.log" 2>&1 < /dev/null
  code=$?
  [ $code -eq 0 ] || failures=$((failures + 1))
  {
    printf '### %s\n\n`%s`\n\n' "$name" "${*//$bin\//}"
    if [ $code -eq 124 ]; then
      printf 'Stopped after %s s.\n\n' "$limit"
    elif [ $code -ne 0 ]; then
      printf '**Failed** with exit code %s.\n\n' "$code"
    fi
    printf '```\n'
    grep -v -e '^\[ RUN' -e '^\[---' -e '^Running main' -e 'Global test environment' "$out/step.log" | tail -60 | cut -c 1-200
    printf '```\n\n(%s s)\n\n' $((SECONDS - began))
  } >> "$report"
  tail -5 "$out/step.log"
  printf '%s{"step": "%s", "exit_code": %s, "seconds": %s' "$separator" "$name" "$code" $((SECONDS - began)) >> "$json"
  [ ! -s "$out/step.json" ] || { printf ', "result": ' && cat "$out/step.json"; } >> "$json"
  printf '}' >> "$json"
  separator=$',\n'
  rm -f "$out/step.json"
}

bench() { # NAME SECONDS OPTIONS...
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "$bin/streambp" bench --device cuda --json "$out/step.json" "$@"
}

section "Correct"
tests=("$bin/test_gpu" --gtest_brief=1)
step "Operations against the CPU's float64; the device" 120 "${tests[@]}" --gtest_filter='Device*cuda*:GpuJobs*:GpuAdamW*:GpuMuon*:GpuDevice*:CudaDevice*:GpuDriver*'
step "The gradient: several tiles of 2048 rows and several chunks, in all modes" 60 "$bin/streambp" verify --device cuda
step "The walk: all families, all modes, equal bits; training; far memory" 120 "${tests[@]}" --gtest_filter='*GpuWalk*:GpuTraining*:GpuFar*'
step "Ranks: as many as there are GPUs" 60 "${tests[@]}" --gtest_filter='GpuRanks*:GpuProcesses*'
step "Commands" 90 "${tests[@]}" --gtest_filter='GpuCommands*'
section "Fast"
one_layer=(--hidden 4096 --layers 1 --mlp 12288 --vocab 151936 --optimizer none --repeat 3 --profile)
bench "Attention and every operation, 16k, heads of 128" 30 "${one_layer[@]}" --heads 32 --kv-heads 8 --head-dim 128 --length 16384 --mode full stream
bench "Attention, 16k, heads of 64" 20 "${one_layer[@]}" --heads 64 --kv-heads 8 --head-dim 64 --length 16384 --mode full
bench "AdamW" 30 --model qwen3-0.6b --length 2048 --mode stream --repeat 3 --profile
for length in 6144 12288 18432 24576 27648; do
  bench "Qwen3-4B, $length" 40 --model qwen3-4b --length $length --optimizer none --mode checkpoint stream --chunk 4096 --repeat 2
done
for length in 8192 32768 131072; do
  bench "Qwen3-0.6B, $length" 40 --model qwen3-0.6b --length $length --optimizer none --mode checkpoint stream --chunk 4096 --repeat 2
done
for length in 8192 32768; do
  bench "Qwen3-8B, $length" 60 --model qwen3-8b --length $length --optimizer none --mode stream --chunk 4096 --repeat 1
done
if python3 -c 'import torch, transformers' 2> /dev/null && [ -e scripts/compare_torch.py ]; then
  section "Comparison with PyTorch"
  step "PyTorch, Qwen3-0.6B" 180 python3 scripts/compare_torch.py --streambp "$bin/streambp" --model qwen3-0.6b --length 8192 32768 --chunk 4096 --json "$out/step.json"
fi

section "Checked by compute-sanitizer"
# Check our kernels only, and leave out the tests that call cuBLASLt: instrumenting its kernels takes minutes, and without
# that initcheck takes their results for uninitialized memory.
if command -v compute-sanitizer > /dev/null; then
  export STREAMBP_SMALL_TESTS=1
  for tool in memcheck racecheck initcheck; do
    step "compute-sanitizer $tool" 75 compute-sanitizer --tool "$tool" --kernel-name kns=streambp --error-exitcode 9 \
      "${tests[@]}" --gtest_filter='Device*cuda*:GpuJobs*:GpuAdamW*-*MatrixProducts*:GpuJobs.AStep*'
  done
  unset STREAMBP_SMALL_TESTS
fi

printf '\n], "failures": %s}\n' "$failures" >> "$json"
mv "$json" "$out/report.json"
printf '%s steps failed. The report took %s s.\n' "$failures" $((SECONDS - start)) | tee -a "$report"
rm -f "$out/step.log" "$out/first.txt"
echo "written: $report and $out/report.json"
[ "$failures" -eq 0 ]
