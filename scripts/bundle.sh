#!/usr/bin/env bash
# Packs the program, its GPU tests, the measuring scripts and the shared libraries they need into one folder. It runs on
# a GPU machine without installing anything.
#   scripts/bundle.sh DIR                            DIR must not exist
#   scripts/bundle.sh DIR --without-cublas           leaves out cuBLASLt (500 MB), for machines that have CUDA's libraries
#   scripts/bundle.sh DIR --archive                  packs the folder into DIR.tar.xz as well
#   scripts/bundle.sh DIR --architectures 90-real    default: compute capability 8.0, 9.0, 10.0 and 12.0, if nvcc has them
#   scripts/bundle.sh DIR --toolkit /usr/local/cuda-12.8    builds with this CUDA toolkit: CUDA 13 needs driver r580 or
#                                                    newer, CUDA 12 runs on r525 (default: the one of nvcc in PATH)
# After a change, a second bundle in another folder compiles only what changed. On the machine: DIR/scripts/gpu_report.sh,
# or DIR/scripts/gpu_day.sh (docs/gpu-day.md).
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  sed -n '2,11s/^# //p' "$0" >&2
  exit 2
}
bundle="" with_cublas=1 archive=0 architectures="" toolkit=""
while [ $# -gt 0 ]; do
  case "$1" in
    --without-cublas) with_cublas=0 ;;
    --archive) archive=1 ;;
    --architectures) [ $# -gt 1 ] || usage && architectures=$2 && shift ;;
    --toolkit) [ $# -gt 1 ] || usage && toolkit=$2 && shift ;;
    -*) echo "bundle.sh: unknown option $1" >&2 && usage ;;
    *) [ -z "$bundle" ] || usage && bundle=$1 ;;
  esac
  shift
done
[ -n "$bundle" ] || usage
[ ! -e "$bundle" ] || { echo "bundle.sh: $bundle already exists; remove it, or give another name" >&2 && exit 2; }
nvcc=${toolkit:+$toolkit/bin/}nvcc
if ! nvcc=$(command -v "$nvcc"); then
  echo "bundle.sh: ${toolkit:+$toolkit/bin/}nvcc was not found; install a CUDA toolkit (12.4 or later), or name one: --toolkit DIR" >&2
  exit 2
fi

# A cubin runs on later minor versions of its compute capability. GPUs without one compile the PTX of 9.0 at first use.
if [ -z "$architectures" ]; then
  known=$("$nvcc" --list-gpu-arch)
  for architecture in 80-real 90 100-real 120-real; do
    if grep -qx "compute_${architecture%-real}" <<< "$known"; then
      architectures=${architectures:+$architectures;}$architecture
    fi
  done
fi
version=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
echo "CUDA $version, compute capabilities $architectures"

programs=(streambp test_gpu)
build=build-bundle-$version
export LD_LIBRARY_PATH=$(dirname "$nvcc")/../lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} # to run the programs here
cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DSTREAMBP_CUDA=ON -DSTREAMBP_NCCL=OFF -DSTREAMBP_MPI=OFF -DSTREAMBP_TESTS=ON \
  -DCMAKE_INSTALL_RPATH='$ORIGIN/../lib' -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON -DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags \
  -DCMAKE_CUDA_COMPILER="$nvcc" ${toolkit:+-DCUDAToolkit_ROOT="$toolkit"} \
  -DCMAKE_CUDA_ARCHITECTURES="$architectures" > /dev/null
cmake --build "$build" -j "$(nproc)" --target "${programs[@]}"

# Build under another name; rename when complete.
partial=$bundle.partial
rm -rf "$partial"
mkdir -p "$partial/bin" "$partial/lib" "$partial/scripts"
for program in "${programs[@]}"; do
  strip -o "$partial/bin/$program" "$build/$program"
  ldd "$build/$program"
done | awk '$2 == "=>" { print $3 }' | sort -u | while read -r library; do
  case "$(basename "$library")" in
    libc.so.* | libm.so.* | libdl.so.* | librt.so.* | libpthread.so.* | ld-linux*) ;; # the machine has its own
    libcublasLt.so.*) [ $with_cublas -eq 0 ] || cp -L "$library" "$partial/lib/" ;;
    *) cp -L "$library" "$partial/lib/" ;;
  esac
done
cp scripts/gpu_{day,report,steps}.sh scripts/compare_{torch,decoding}.py scripts/torch_jobs.py "$partial/scripts/"
mkdir "$partial/tests"
cp -r tests/golden "$partial/tests/"
git describe --always --dirty --abbrev=40 > "$partial/commit" 2> /dev/null || echo unknown > "$partial/commit"
echo "$version" > "$partial/cuda"
mv "$partial" "$bundle"
du -sh "$bundle"
if [ $archive -eq 1 ]; then
  tar -C "$(dirname "$bundle")" -c "$(basename "$bundle")" | xz -T0 -6 > "$bundle.tar.xz.partial"
  mv "$bundle.tar.xz.partial" "$bundle.tar.xz"
  du -sh "$bundle.tar.xz"
fi
