#!/usr/bin/env bash
# Installs the packages that building and testing streambp needs, on Debian and Ubuntu. Skips installed packages.
#   scripts/setup.sh             what scripts/test.sh needs
#   scripts/setup.sh --arm       also a cross compiler and an emulator for 64-bit Arm, for scripts/fingerprints.sh
#   scripts/setup.sh --browser   also Chromium, in which the tests open the pages that the program writes
set -euo pipefail

packages=(g++ make cmake libcli11-dev nlohmann-json3-dev libpcre2-dev libutf8proc-dev libxxhash-dev zlib1g-dev libzstd-dev libgtest-dev libopenmpi-dev openmpi-bin)
case "${1:-}" in
  "") ;;
  --arm) packages+=(g++-aarch64-linux-gnu qemu-user) ;;
  --browser) packages+=(chromium) ;;
  *) echo "setup.sh: unknown option \"$1\"; use --arm or --browser" >&2 && exit 2 ;;
esac

if ! command -v apt-get > /dev/null; then
  cat >&2 << EOF
setup.sh supports Debian and Ubuntu. On another system, install these with its package manager:
  a C++20 compiler with OpenMP (g++ 12 or later), make, CMake 3.22 or later,
  CLI11, nlohmann-json, PCRE2, utf8proc, xxHash, zlib, zstd and GoogleTest, with their headers; for several processes an MPI.
EOF
  exit 2
fi

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2> /dev/null | grep -q "ok installed" || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  echo "setup: everything is installed"
  exit 0
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo > /dev/null; then
    echo "setup: run this as root, or install sudo: apt-get install ${missing[*]}" >&2
    exit 2
  fi
  as_root=(sudo)
fi
echo "setup: installing ${missing[*]}"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
echo "setup: done"
