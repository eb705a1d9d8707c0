#!/usr/bin/env bash
# What to run first on a rented GPU, in three short runs; between them, read the summary and mend. See docs/gpu-day.md.
#   scripts/gpu_day.sh correct [OUT]           gradients, all GPU tests, a first profile (230 s)
#   scripts/gpu_day.sh speed [OUT] [TESTS]     what failed, again; layers, models, PyTorch, Nsight Compute (260 s)
#   scripts/gpu_day.sh rest [OUT] [TESTS]      compute-sanitizer, decoding, far memory (180 s)
# TESTS: a filter of GoogleTest, as the summary prints it. OUT (default: gpu-day) gets summary.txt, logs.tar.gz and
# bench.tar.gz. Run it in a folder of scripts/bundle.sh, or in a checkout built with CUDA.
set -uo pipefail
. "$(dirname "$0")/gpu_steps.sh"

usage() {
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
}
[ $# -ge 1 ] && [ $# -le 3 ] || usage
what=$1 to=${2:-gpu-day} again=${3:-}
case $to in -*) usage ;; esac

lengths=(4096 32768) layer=16384 long=131072 chunk=4096
[ -z "${STREAMBP_SMALL_GPU:-}" ] || lengths=(300 600) layer=600 long=900 chunk=4096

one_layer() { # NAME HEADS HEAD-DIM
  bench "$1" 30 $(qwen3 8B 1 "$2" "$3") --length $layer --chunk $chunk --mode stream --repeat 3 --profile
}

other_layers() { # NAME FAMILY OPTIONS...
  local name=$1 family=$2
  shift 2
  [ -z "${STREAMBP_SMALL_GPU:-}" ] || set -- --layers 4 --vocab 300 --hidden 64
  bench "$name" 20 --family "$family" "$@" --optimizer none --length ${lengths[0]} $layer --chunk $chunk --mode stream --repeat 2 --profile
}

# What one launch after the other, and cuBLASLt's log, say about a command that failed.
explain() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2
  shift 2
  CUDA_LAUNCH_BLOCKING=1 CUBLASLT_LOG_LEVEL=2 step "$name-blocking" "$limit" "$@" &
  STREAMBP_SMALL_TESTS=1 step "$name-memcheck" "$limit" compute-sanitizer --kernel-name kns=streambp --error-exitcode 9 "$@" &
  wait
}

again() {
  [ -z "$again" ] || gpu_tests again 4 40 "$again"
}

correct() {
  local dtype test verify=("$bin/streambp" verify --device cuda --length 300 --tile 256)
  step machine 10 sh -c 'nvidia-smi; lscpu; head -5 /proc/meminfo; uname -a; ldd "$STREAMBP_BINARY"; nvcc --version; true'
  step devices 20 "$bin/streambp" devices
  for dtype in f32 bf16; do
    step verify-$dtype 30 "${verify[@]}" --dtype $dtype && continue
    explain verify-$dtype 40 "${verify[@]}" --dtype $dtype
    return
  done
  one_layer layer-128 32 128
  gpu_tests tests 10 110 '*' && return
  while read -r test; do
    explain "$(names_of "$test")" 40 "$bin/test_gpu" --gtest_filter="$test" &
  done < <(head -5 "$work/tests.failed")
  wait
}

speed() {
  local size layers
  again
  one_layer layer-128 32 128
  one_layer layer-64 64 64
  one_layer layer-256 16 256
  other_layers experts qwen3_moe --layers 1 --vocab 151936 --hidden 2048 --heads 32 --kv-heads 4 --head-dim 128 --mlp 6144 \
    --experts 128 --experts-per-token 8
  other_layers delta-rule qwen3_5 --layers 4 --vocab 151936 --hidden 2560 --heads 16 --kv-heads 4 --head-dim 256 --mlp 9216 --tied yes
  other_layers convolution lfm2 --layers 6 --vocab 65536 --hidden 2048 --heads 32 --kv-heads 8 --head-dim 64 --mlp 8192 --tied yes
  for size in 0.6B 4B 8B; do # time is linear in layers: two numbers of layers give that of the whole model
    for layers in 2 6; do
      bench "$size-$layers-layers" 30 $(qwen3 $size $layers) --length "${lengths[@]}" --chunk $chunk --mode stream \
        --keep nothing attention=near --repeat 2
    done
  done
  step torch-attention 40 python3 scripts/torch_jobs.py '{"do": "attention", "length": '$layer', "widths": [64, 128, 256]}'
  step ncu 50 ncu --clock-control none --set full --kernel-id "::regex:flash:[12]" -f -o "$work/ncu" "$bin/streambp" bench \
    --device cuda $(qwen3 8B 1) --length $((2 * chunk)) --chunk $chunk --mode stream --repeat 1 # two chunks: with the diagonal, and below
  step ncu-details 15 ncu --import "$work/ncu.ncu-rep" --page details --print-details all
  step ncu-source 15 ncu --import "$work/ncu.ncu-rep" --page source --csv
  step compare-torch 80 python3 scripts/compare_torch.py --streambp "$bin/streambp" --model qwen3-0.6b --length 8192 --chunk $chunk \
    --only torch-checkpoint torch-chunked stream --skip-agreement --limit 40 --json "$work/bench/compare-torch.json"
  for size in 0.6B 4B 8B; do
    bench "$size-long" 25 $(qwen3 $size 1) --length $long --chunk $chunk --mode stream --repeat 1
  done
}

rest() {
  local tool sequences model=$work/model shape="--hidden 1024 --layers 28 --heads 16 --kv-heads 8 --head-dim 128 --mlp 3072"
  [ -z "${STREAMBP_SMALL_GPU:-}" ] || shape="--hidden 64 --layers 2"
  again
  for tool in memcheck racecheck initcheck; do sanitize $tool 90 & done
  wait
  step model 30 "$bin/streambp" train --device cuda --family qwen3 $shape --length 256 --batch 1 --steps 1 \
    --sample 0 --optimizer adamw-bf16 --eval-every 0 --out "$model"
  for sequences in 1 64; do
    decode decode-$sequences $sequences
    STREAMBP_NO_GRAPHS=1 decode decode-$sequences-without-graphs $sequences
  done
  decode decode-long 1 "$(seq 1 "$([ -z "${STREAMBP_SMALL_GPU:-}" ] && echo 6800 || echo 50)")" # 32 892 bytes, a token each
  bench far 30 $(qwen3 8B 2) --length "${lengths[@]}" --chunk $chunk --mode stream --keep attention=far --repeat 2
  step verify 40 "$bin/streambp" verify --device cuda
}

decode() { # NAME SEQUENCES [PROMPT]
  step "$1" 20 "$bin/streambp" generate --device cuda --model "$model" --prompt "${3:-Once upon a time}" --length 256 --samples "$2" --stats
}

case $what in
  correct) begin "$to" 230 && correct ;;
  speed) begin "$to" 260 && speed ;;
  rest) begin "$to" 180 && rest ;;
  *) usage ;;
esac
finish
