#!/usr/bin/env bash
# Builds the program from fetched sources of all libraries, as if none were installed, and checks that it links none of the
# system's, computes the same gradient, and is installed with all that docs/your-own-loss.cpp needs.
#   scripts/check_fetch.sh               downloads the seven archives (14 MB) from GitHub
#   scripts/check_fetch.sh ARCHIVES      takes those that are in this folder: NAME-VERSION.tar.gz (cmake/dependencies.cmake)
# Needs a compiler with OpenMP, make, CMake and ldd; ten minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."

[ $# -le 1 ] || { sed -n '2,6s/^# //p' "$0" >&2 && exit 2; }
build=build-fetched
archives=$(realpath "${1:-$build/archives}")
rm -rf $build/fetched $build/installed $build/own
cmake -S . -B $build -DSTREAMBP_FETCH=ON -DSTREAMBP_ARCHIVES="$archives" -DSTREAMBP_CUDA=OFF -DSTREAMBP_MPI=OFF -DSTREAMBP_TESTS=OFF
cmake --build $build -j "$(nproc)"
cmake --install $build --prefix $build/installed > /dev/null

mkdir $build/own
sed -n '/^```cmake/,/^```/{/^```/!p}' docs/library.md > $build/own/CMakeLists.txt
cp docs/your-own-loss.cpp $build/own
cmake -S $build/own -B $build/own/build -DCMAKE_PREFIX_PATH="$PWD/$build/installed" > /dev/null
cmake --build $build/own/build

own_loss=$build/own/build/your-own-loss program=$build/installed/bin/streambp
system="libpcre2|libutf8proc|libz\.|libzstd|libxxhash"
for binary in $program $own_loss; do
  if ldd $binary | grep -E "$system"; then
    echo "check_fetch.sh: $binary uses these libraries of the system" >&2 && exit 1
  fi
done
headers="^[^#]*/usr/(local/)?include/(CLI/|nlohmann/|pcre2|utf8proc|xxhash|zlib|zstd)"
if grep -rhoE "$headers[^ ]*" $build/CMakeFiles $build/own/build --include='*.d' | sort -u | grep .; then
  echo "check_fetch.sh: these headers of the system were used" >&2 && exit 1
fi

$program verify --family qwen3 --dtype f64 --oracle | tee $build/verified
grep -q 35ee547b0ef6181a $build/verified
rm -rf $build/model
$program train --layers 1 --hidden 32 --heads 2 --steps 1 --length 64 --sample 0 --out $build/model > /dev/null
$own_loss $build/model/step-000001 "To be or not to be" | tail -n 1
echo "check_fetch.sh: everything was built from the pinned sources"
