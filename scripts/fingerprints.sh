#!/usr/bin/env bash
# Computes fingerprints of gradients and trained weights for several processors and optimization levels, and compares
# them with tests/golden/fingerprints.txt. Exits with 1 if any differ.
#   scripts/fingerprints.sh             the processors that this machine can run or emulate
#   scripts/fingerprints.sh --quick     the same, but only one family on an emulated processor, which is slow
#   scripts/fingerprints.sh --native    without emulation
#   scripts/fingerprints.sh --update    after an intended change of the arithmetic: writes the file, for x86-64-v3
# To emulate 64-bit Arm, it needs a cross compiler and QEMU: scripts/setup.sh --arm installs them.
set -euo pipefail
cd "$(dirname "$0")/.."

mode=${1:-}
case "$mode" in
  "" | --quick | --native | --update) [ $# -le 1 ] || { echo "fingerprints.sh: it takes one option" >&2 && exit 2; } ;;
  --help | -h) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
  *) echo "fingerprints.sh: unknown option \"$mode\"; use --quick, --native or --update" >&2 && exit 2 ;;
esac

expected=tests/golden/fingerprints.txt
out=build-fingerprints
mkdir -p "$out"
names=() skipped=() jobs=()
emulated=() # families to compute under emulation; none: all
[ "$mode" != --quick ] || emulated=(qwen3)

# build PROGRAM COMPILER FLAGS...
build() {
  local program=$1 begin=$SECONDS objects=() avx512=(-mavx512f -mavx512bw -mavx512dq -mavx512vl)
  shift
  local compile=("$@" -std=c++20 -DNDEBUG -fopenmp -Wall -Wextra -Werror -ffp-contract=off -I.)
  inner_loops() { # INSTRUCTIONS FLAGS...: as in CMakeLists.txt
    local instructions=$1 file
    shift
    for file in products few_rows softmax_rows; do
      objects+=("$program-$instructions-$file.o")
      "${compile[@]}" "$@" "-DSTREAMBP_INSTRUCTIONS=$instructions" -c "kernels/base/$file.cpp" -o "${objects[-1]}"
    done
  }
  if [[ $("$1" -dumpmachine) == x86_64* ]]; then
    inner_loops avx2 -mavx2 -mfma -mno-avx512f
    inner_loops avx512 "${avx512[@]}" -mno-avx512bf16
    inner_loops avx512bf16 "${avx512[@]}" -mavx512bf16
  else
    inner_loops neon
  fi
  "${compile[@]}" tests/fingerprints.cpp kernels/base/{gemm,inner_loops}.cpp "${objects[@]}" -o "$program"
  echo "fingerprints: $(basename "$program") built in $((SECONDS - begin)) s"
}

# compute NAME "INSTRUCTIONS..." COMPILER FLAGS... [-- EMULATOR...]: builds a program and runs it with each
# of these instruction sets, in the background, with as many programs at a time as there are processors.
compute() {
  local instructions
  for instructions in $2; do names+=("$1-$instructions"); done
  [ "$(jobs -rp | wc -l)" -lt "$(nproc)" ] || wait -n
  build_and_run "$@" &
  jobs+=($!)
}
build_and_run() {
  local name=$1 all=$2 flags=() instructions begin
  shift 2
  while [ $# -gt 0 ] && [ "$1" != -- ]; do flags+=("$1") && shift; done
  [ $# -eq 0 ] || shift
  build "$out/$name" "${flags[@]}"
  for instructions in $all; do
    begin=$SECONDS
    if [ $# -eq 0 ]; then
      "$out/$name" "$instructions" > "$out/$name-$instructions.txt"
    else
      "$@" "$out/$name" "$instructions" "${emulated[@]}" > "$out/$name-$instructions.txt"
    fi
    echo "fingerprints: $name ran with $instructions in $((SECONDS - begin)) s"
  done
}

runs() { # whether this processor has all of these features
  local feature
  for feature in "$@"; do grep -qw "$feature" /proc/cpuinfo || return 1; done
}

machine=$(uname -m)
if [ "$machine" = x86_64 ]; then
  compute v3-O1 AVX2 g++ -O1 -march=x86-64-v3
  if ! runs avx512f avx512bw avx512dq avx512vl; then
    [ "$mode" = --update ] || compute v3-O3 AVX2 g++ -O3 -march=x86-64-v3
    skipped+=("AVX-512 and AVX512_BF16: this processor does not have them")
  elif runs avx512_bf16; then
    compute v4-O3 "AVX2 AVX-512 AVX512_BF16" g++ -O3 -march=x86-64-v4
  else
    compute v4-O3 "AVX2 AVX-512" g++ -O3 -march=x86-64-v4
    skipped+=("AVX512_BF16: this processor does not multiply pairs of bfloat16")
  fi
else
  compute native NEON g++ -O3 -mcpu=native
  skipped+=("x86-64: this is $machine")
fi
if [ "$machine" != aarch64 ]; then
  if [ -n "$mode" ] && [ "$mode" != --quick ]; then
    skipped+=("Arm: $mode does not emulate")
  elif command -v aarch64-linux-gnu-g++ > /dev/null && command -v qemu-aarch64 > /dev/null; then
    compute armv8-O3 NEON aarch64-linux-gnu-g++ -O3 -march=armv8-a -- qemu-aarch64 -L /usr/aarch64-linux-gnu
  else
    skipped+=("Arm: no cross compiler or no QEMU; scripts/setup.sh --arm installs them")
  fi
fi
for job in "${jobs[@]}"; do wait "$job"; done
[ "$mode" != --update ] || cp "$out/${names[0]}.txt" "$expected"

# A row per fingerprint, a column per processor.
differ=0
cmp -s <(cut -d' ' -f1-3 "$expected") <(cut -d' ' -f1-3 "$out/${names[0]}.txt") || {
  echo "fingerprints: $expected does not name the fingerprints of this version; --update writes it" >&2 && exit 1
}
row() { printf '%-20s %-16s' "$1" "$2" && shift 2 && printf '  %-18s' "$@" && echo; }
row "" expected "${names[@]}"
while read -r family dtype what fingerprint; do
  cells=()
  for name in "${names[@]}"; do
    found=$(awk -v what="$family $dtype $what" '$1 " " $2 " " $3 == what { print $4 }' "$out/$name.txt")
    if [ "$found" = "$fingerprint" ]; then
      cells+=(same)
    elif [ -z "$found" ] && [ "$mode" = --quick ] && [[ $name == armv8* && $family != "${emulated[0]}" ]]; then
      cells+=(-)
    else
      cells+=("${found:-missing}") && differ=1
    fi
  done
  row "$family $dtype $what" "$fingerprint" "${cells[@]}"
done < "$expected"
for reason in "${skipped[@]}"; do echo "skipped $reason"; done
[ "$differ" -eq 0 ] || { echo "fingerprints: they differ" >&2 && exit 1; }
echo "fingerprints: all equal"
