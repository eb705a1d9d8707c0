# Sourced by gpu_day.sh and gpu_report.sh: runs steps on a GPU machine, each with a time limit and its own log. A step that
# fails, crashes or hangs costs only itself.

# begin OUT SECONDS: the steps take at most so long together. Writes OUT/summary.txt, logs.tar.gz and bench.tar.gz.
begin() {
  local program
  mkdir -p "$1" || exit 2
  out=$(cd "$1" && pwd) budget=$2 started=$SECONDS
  cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
  bin=$PWD/build
  [ ! -d bin ] || bin=$PWD/bin
  for program in streambp test_gpu; do
    [ -x "$bin/$program" ] && continue
    echo "$(basename "$0"): $bin/$program is missing; build with CUDA and tests, or run in a folder of scripts/bundle.sh" >&2
    exit 2
  done
  export STREAMBP_BINARY=$bin/streambp STREAMBP_SOURCE=$PWD PYTHONUNBUFFERED=1
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  mkdir "$work/logs" "$work/bench"
  : > "$work/steps"
  about="$(basename "$0" .sh) of commit $(cat commit 2> /dev/null || git describe --always --dirty --abbrev=40 2> /dev/null),"
  about+=" $(date -u '+%Y-%m-%d %H:%M') UTC, $(timeout -k 1 10 nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null | head -1)"
  find_cublas
}

# A bundle looks for libraries in lib/ and then in the system. cuBLASLt may be elsewhere: in CUDA's folder or in a package
# of Python's. (LD_LIBRARY_PATH would reach Python too, and give it other libraries than it was built for.)
find_cublas() {
  local name folder
  name=$(ldd "$bin/streambp" | awk '/libcublasLt.*not found/ { print $1 }')
  [ -n "$name" ] || return 0
  for folder in ${CUDA_HOME:+"$CUDA_HOME/lib64"} /usr/local/cuda*/lib64 /usr/local/cuda*/targets/*/lib \
    $(python3 -c 'import glob, nvidia; print(*[f for p in nvidia.__path__ for f in glob.glob(p + "/*/lib")])' 2> /dev/null); do
    [ -e "$folder/$name" ] || continue
    mkdir -p "$PWD/lib" && ln -sf "$folder/$name" "$PWD/lib/$name"
    return
  done
  echo "$(basename "$0"): $name was not found; install CUDA's libraries, or make the bundle with them" >&2
  exit 2
}

# step NAME SECONDS COMMAND...: the exit code is that of the command, 124 if it was stopped. NAME is also that of its log.
step() {
  local name=$1 limit=$2 began=$SECONDS left=$((budget - SECONDS + started)) code said
  shift 2
  if [ $left -lt 5 ]; then
    printf '%s\t%s\t0\n' "$name" "not run, no time left" >> "$work/steps"
    return 125
  fi
  [ "$limit" -le $left ] || limit=$left
  [ "$limit" -le "${STREAMBP_STEP_LIMIT:-$limit}" ] || limit=$STREAMBP_STEP_LIMIT # for rehearsals
  echo "== $name (after $((SECONDS - started)) s)"
  printf '$ %s\n' "$*" > "$work/logs/$name.log"
  timeout -k 5 "$limit" "$@" >> "$work/logs/$name.log" 2>&1 < /dev/null
  code=$?
  [ $code -ne 137 ] || [ $((SECONDS - began)) -lt "$limit" ] || code=124 # it did not end by itself
  case $code in
    0) said=ok ;;
    124) said="STOPPED after $limit s" ;;
    129 | 13? | 14?) said="CRASHED, signal $((code - 128))" ;;
    *) said="FAILED, exit code $code" ;;
  esac
  printf '%s\t%s\t%s\n' "$name" "$said" $((SECONDS - began)) >> "$work/steps"
  [ "$BASHPID" != $$ ] || pack # so that what is known survives if this machine hangs
  return $code
}

# at_once N: waits until fewer than N steps run in the background.
at_once() {
  while [ "$(jobs -rp | wc -l)" -ge "$1" ]; do wait -n; done
}

# bench NAME SECONDS OPTIONS...
bench() {
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "$bin/streambp" bench --device cuda --json "$work/bench/$name.json" "$@"
}

# The options of a model like Qwen3 of this size, with so many layers, and with other heads if they are given.
qwen3() { # SIZE LAYERS [HEADS HEAD-DIM]
  local shape heads
  case $1 in
    0.6B) shape="--hidden 1024 --mlp 3072 --tied yes" heads=16 ;;
    4B) shape="--hidden 2560 --mlp 9728 --tied yes" heads=32 ;;
    8B) shape="--hidden 4096 --mlp 12288 --tied no" heads=32 ;;
  esac
  if [ -n "${STREAMBP_SMALL_GPU:-}" ]; then # a rehearsal with emulated GPU code
    echo "--family qwen3 --layers $2 --vocab 300 --hidden 64 --heads 4 --kv-heads 2 --head-dim 16 --mlp 96 --optimizer none"
  else
    echo "--family qwen3 --layers $2 --vocab 151936 $shape --heads ${3:-$heads} --kv-heads 8 --head-dim ${4:-128} --optimizer none"
  fi
}

# --- GPU tests ---

names_of() { tr '/' '-' <<< "$1"; } # for a log

# After one CUDA error all later tests of a process fail. So tests run in several processes, and what failed, or was lost
# in a crash, runs again alone.
#   gpu_tests NAME PROCESSES SECONDS FILTER: writes $work/NAME.passed, .skipped and .failed
gpu_tests() {
  local name=$1 processes=$2 limit=$3 i part test
  timeout -k 5 20 "$bin/test_gpu" --gtest_list_tests --gtest_filter="$4" 2> /dev/null |
    awk '/^[^ ]/ { suite = $1; next } { print suite $1 }' > "$work/$name.all"
  [ -s "$work/$name.all" ] || { printf '%s\tFAILED, no such test\t0\n' "$name" >> "$work/steps" && return 1; }
  for ((i = 0; i < processes; ++i)); do
    part=$(awk -v n="$processes" -v i="$i" 'NR % n == i' "$work/$name.all" | paste -sd:)
    [ -z "$part" ] || OMP_NUM_THREADS=2 step "$name-$i" "$limit" "$bin/test_gpu" --gtest_filter="$part" \
      --gtest_output="json:$work/bench/$name-$i.json" &
  done
  wait
  outcome_of_tests "$name" "$name-[0-9]*"
  [ -s "$work/$name.failed" ] || return 0
  cp "$work/$name.failed" "$work/$name.once"
  while read -r test; do
    at_once 8
    OMP_NUM_THREADS=2 step "$name-alone-$(names_of "$test")" 30 "$bin/test_gpu" --gtest_filter="$test" &
  done < <(head -40 "$work/$name.once")
  wait
  outcome_of_tests "$name" "$name-*"
  comm -13 <(sort "$work/$name.failed") <(sort "$work/$name.once") > "$work/$name.flaky"
  [ ! -s "$work/$name.failed" ]
}

# Reads the logs: what ended well in any of them has passed.
outcome_of_tests() { # NAME LOGS
  rm -f "$work/$1".{passed,skipped,failed}
  (cd "$work/logs" && cat $2.log) | awk -v all="$work/$1.all" -v to="$work/$1." '
    /^\[       OK \] / { state[$4] = "passed" }
    /^\[  SKIPPED \] / { sub(/,$/, "", $4); if (state[$4] == "") state[$4] = "skipped" }
    END {
      while ((getline test < all) > 0) print test > (to (state[test] == "" ? "failed" : state[test]))
      for (s = split("passed skipped failed", names); s > 0; --s) printf "" >> (to names[s])
    }'
}

# sanitize TOOL SECONDS: small tests of our kernels. Those that call cuBLASLt are left out: instrumenting its kernels takes
# minutes, and without that initcheck takes their results for uninitialized memory. In four processes, because racecheck
# takes minutes in one.
sanitize() {
  local i
  for i in 0 1 2 3; do
    GTEST_TOTAL_SHARDS=4 GTEST_SHARD_INDEX=$i STREAMBP_SMALL_TESTS=1 step "$1-$i" "$2" compute-sanitizer --tool "$1" \
      --kernel-name kns=streambp --error-exitcode 9 "$bin/test_gpu" \
      --gtest_filter='Device*cuda*:GpuJobs*:GpuAdamW*-*MatrixProducts*:GpuJobs.AStep*' &
  done
  [ "$1" != racecheck ] || for i in lfm2 qwen3_5 qwen3_moe qwen3_next; do # their kernels, in a whole gradient
    STREAMBP_SMALL_TESTS=1 step "$1-$i" "$2" compute-sanitizer --tool "$1" --kernel-name kns=streambp --error-exitcode 9 \
      "$bin/test_gpu" --gtest_filter="*GpuWalk.GradientIn*/$i" &
  done
  wait
}

# --- The summary ---

pack() {
  summarise > "$out/summary.txt.new"
  mv "$out/summary.txt.new" "$out/summary.txt"
  tar -C "$work" -czf "$out/logs.tar.gz" logs
  tar -C "$work" -czf "$out/bench.tar.gz" bench
}

summarise() {
  local name said log
  echo "$about, $((SECONDS - started)) s"
  awk -F '\t' '!/-alone-.*\tok/ { printf "%5d s  %-42s %s\n", $3, $1, $2 }' "$work/steps"
  for name in "$work"/*.all; do
    [ -e "$name" ] || continue
    name=${name%.all}
    echo "-- $(basename "$name"): $(wc -l < "$name.passed") passed, $(wc -l < "$name.skipped") skipped, $(wc -l < "$name.failed") failed"
    sed 's/^/     failed: /' "$name.failed"
    [ ! -e "$name.flaky" ] || sed 's/^/     failed beside other tests, passed alone: /' "$name.flaky"
    [ ! -s "$name.failed" ] || echo "     again: $(dirname "$0")/gpu_day.sh speed OUT '$(paste -sd: "$name.failed")'"
  done
  while IFS=$'\t' read -r name said _; do
    log=$work/logs/$name.log
    [ -e "$log" ] || continue
    grep -E '^(full|checkpoint|stream|fastest|attention|PyTorch|SDPA|Copy within|.* tokens:|\[[0-9]+ tokens|The driver uses|.*ERROR SUMMARY|.*RACECHECK)' "$log" |
      sed "s|^|$name: |" | cut -c 1-150 | head -24
    [ "$said" != ok ] && [ ! -e "$work/${name%-*}.all" ] || continue # tests run again alone
    echo "-- $name.log:"
    { grep -A4 -m2 'Failure$' "$log" || tail -n +2 "$log" | tail -5; } | cut -c 1-200
  done < "$work/steps"
}

# Prints the summary. The exit code says whether all steps were ok.
finish() {
  pack
  head -c 9000 "$out/summary.txt"
  echo "written: $out/summary.txt, logs.tar.gz and bench.tar.gz"
  ! grep -qvP '\tok\t' "$work/steps"
}
