#!/usr/bin/env bash
# Packs the program, its GPU tests, the scripts that measure it and the shared libraries that they need into one folder,
# which runs on a GPU machine where nothing can be installed.
#   scripts/bundle.sh DIR                        DIR must not exist
#   scripts/bundle.sh DIR --without-cublas       leaves out cuBLASLt (500 MB), for machines that have CUDA's libraries
#   scripts/bundle.sh DIR --archive              packs the folder into DIR.tar.xz as well
#   scripts/bundle.sh DIR --architectures "80;90"
# On the machine: DIR/scripts/gpu_report.sh
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  sed -n '2,8s/^# //p' "$0" >&2
  exit 2
}
bundle="" with_cublas=1 archive=0 architectures="80;90"
while [ $# -gt 0 ]; do
  case "$1" in
    --without-cublas) with_cublas=0 ;;
    --archive) archive=1 ;;
    --architectures) [ $# -gt 1 ] || usage && architectures=$2 && shift ;;
    -*) echo "bundle.sh: there is no option $1" >&2 && usage ;;
    *) [ -z "$bundle" ] || usage && bundle=$1 ;;
  esac
  shift
done
[ -n "$bundle" ] || usage
[ ! -e "$bundle" ] || { echo "bundle.sh: $bundle is there already; remove it, or give another name" >&2 && exit 2; }
command -v nvcc > /dev/null || { echo "bundle.sh: nvcc was not found; install the CUDA toolkit" >&2 && exit 2; }

programs=(streambp gpu_operations gpu_walk gpu_commands)
cmake -S . -B build-bundle -DCMAKE_BUILD_TYPE=Release -DSTREAMBP_CUDA=ON -DSTREAMBP_NATIVE=OFF -DSTREAMBP_TESTS=ON \
  -DCMAKE_CUDA_ARCHITECTURES="$architectures" > /dev/null
cmake --build build-bundle -j "$(nproc)" --target "${programs[@]}"

# Built under another name and renamed when complete.
partial=$bundle.partial
rm -rf "$partial"
mkdir -p "$partial/bin" "$partial/lib" "$partial/scripts"
for program in "${programs[@]}"; do
  cp "build-bundle/$program" "$partial/bin/"
  ldd "build-bundle/$program"
done | awk '$2 == "=>" { print $3 }' | sort -u | while read -r library; do
  case "$(basename "$library")" in
    libc.so.* | libm.so.* | libdl.so.* | librt.so.* | libpthread.so.* | ld-linux*) ;; # the machine's own
    libcublasLt.so.*) [ $with_cublas -eq 0 ] || cp -L "$library" "$partial/lib/" ;;
    *) cp -L "$library" "$partial/lib/" ;;
  esac
done
cp scripts/gpu_report.sh scripts/compare_torch.py "$partial/scripts/"
mkdir "$partial/tests"
cp -r tests/golden "$partial/tests/"
git rev-parse HEAD > "$partial/commit" 2> /dev/null || echo unknown > "$partial/commit"
mv "$partial" "$bundle"
du -sh "$bundle"
if [ $archive -eq 1 ]; then
  tar -C "$(dirname "$bundle")" -c "$(basename "$bundle")" | xz -T0 -6 > "$bundle.tar.xz.partial"
  mv "$bundle.tar.xz.partial" "$bundle.tar.xz"
  du -sh "$bundle.tar.xz"
fi
