#!/usr/bin/env bash
# Compiles all kernels for several GPUs, with warnings as errors, and prints the resources of each kernel as reported by
# ptxas: registers, spilled bytes, stack, static shared memory. Fails if a kernel spills more than a few registers. With
# cuobjdump, also what a tile of the attention kernels costs (scripts/attention_loops.py).
#   scripts/kernel_resources.sh              for sm_80, sm_90 and the newest architecture of the toolkit
#   scripts/kernel_resources.sh 86 89        for these
set -euo pipefail
cd "$(dirname "$0")/.."

most_of_delta=800 # bytes; a block of a delta rule holds a whole solve in registers, and spills outside of the products' loops
most_spilled=96 # bytes; a few spilled registers cost less than a block fewer on a multiprocessor (docs/log.md, "Attention on an H100", "A token after a long context")

if ! command -v nvcc > /dev/null; then
  echo "kernel_resources.sh: nvcc was not found; install the CUDA toolkit (12.4 or later)" >&2
  exit 2
fi
architectures=("$@")
if [ $# -eq 0 ]; then
  newest=$(nvcc --list-gpu-arch | sed -n 's/^compute_\([0-9]*\)$/\1/p' | sort -n | tail -1)
  architectures=(80 90 "$newest")
fi
targets=()
for architecture in "${architectures[@]}"; do
  case "$architecture" in
    *[!0-9]* | "") echo "kernel_resources.sh: \"$architecture\" is not an architecture; write 80, 90, ..." >&2 && exit 2 ;;
  esac
  targets+=(-gencode "arch=compute_$architecture,code=sm_$architecture")
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if ! nvcc -std=c++20 -O3 --fmad=false --expt-relaxed-constexpr --extended-lambda -Werror=all-warnings -DSTREAMBP_CUDA \
  -I . -Xcompiler -fopenmp,-Wall,-Wextra,-Werror \
  "${targets[@]}" -Xptxas -v -c tests/all_kernels.cu -o "$work/all.o" > "$work/log" 2>&1; then
  cat "$work/log" >&2
  echo "kernel_resources.sh: the kernels do not compile" >&2
  exit 1
fi

c++filt < "$work/log" | awk -v usual="$most_spilled" -v of_delta="$most_of_delta" '
  /Compiling entry function/ {
    architecture = $0; sub(/.*for \x27/, "", architecture); sub(/\x27.*/, "", architecture)
    kernel = $0; sub(/.*entry function \x27/, "", kernel); sub(/\x27 for .*/, "", kernel)
    sub(/^void /, "", kernel); gsub(/streambp::(cuda|run)::/, "", kernel); gsub(/streambp::/, "", kernel)
    sub(/\(.*lambda.*/, "", kernel); sub(/>\(.*/, ">", kernel); sub(/\([A-Z].*/, "", kernel)
  }
  /bytes stack frame/ { stack = $1; spilled = $5 + 0 }
  /Used [0-9]+ registers/ {
    registers = $0; sub(/.*Used /, "", registers); sub(/ .*/, "", registers)
    shared = 0; if (match($0, /[0-9]+ bytes smem/)) shared = substr($0, RSTART, RLENGTH) + 0
    row[++rows] = sprintf("%-8s %9d %8d %6d %7d  %s", architecture, registers, spilled, stack, shared, kernel)
    most = kernel ~ /^delta_.*_kernel/ ? of_delta : usual
    if (spilled > most) bad = bad "\n  " kernel " on " architecture ": " spilled " bytes"
  }
  END {
    if (rows == 0) { print "kernel_resources.sh: ptxas printed nothing" > "/dev/stderr"; exit 1 }
    printf "%-8s %9s %8s %6s %7s  %s\n", "GPU", "registers", "spilled", "stack", "shared", "kernel"
    for (i = 1; i <= rows; ++i) print row[i] | "sort -k1,1 -k6"
    close("sort -k1,1 -k6")
    if (bad) { print "Kernels that spill more than " usual " bytes:" bad > "/dev/stderr"; exit 1 }
    print rows " kernels, none spills more than " usual " bytes, of delta rules " of_delta
  }'

if command -v cuobjdump > /dev/null && command -v python3 > /dev/null; then
  cuobjdump -sass "$work/all.o" | scripts/attention_loops.py
else
  echo "The cycles of the attention loops are not counted: cuobjdump (of the CUDA toolkit) or python3 was not found."
fi
