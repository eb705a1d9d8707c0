#!/usr/bin/env bash
# Installs the packages that building and testing streambp needs, with apt-get, dnf, pacman or brew. Skips installed
# packages. It was tested with apt-get only, and says so where it uses another.
#   scripts/setup.sh             what scripts/test.sh needs
#   scripts/setup.sh --program   only what building the program for one process needs
#   scripts/setup.sh --arm       also a cross compiler and an emulator for 64-bit Arm, for scripts/fingerprints.sh
#   scripts/setup.sh --browser   also Chromium, in which the tests open the pages that the program writes
set -euo pipefail

which="${1:-}"
case "$which" in
  "" | --program | --arm | --browser) ;;
  *) echo "setup.sh: unknown option \"$which\"; use --program, --arm or --browser" >&2 && exit 2 ;;
esac

# For each package manager: packages for the program, for tests and processes, for --arm and for --browser, the command
# that installs some, and whether one is installed.
for manager in apt-get dnf pacman brew none; do
  command -v $manager > /dev/null && break
done
sudo=""
[ "$(id -u)" -eq 0 ] || sudo=sudo
case $manager in
  apt-get)
    program=(g++ make cmake libcli11-dev nlohmann-json3-dev libpcre2-dev libutf8proc-dev libxxhash-dev zlib1g-dev libzstd-dev libedit-dev)
    tests=(libgtest-dev libopenmpi-dev openmpi-bin) arm=(g++-aarch64-linux-gnu qemu-user) browser=(chromium)
    install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends)
    is_installed() { dpkg-query -W -f '${Status}' "$1" 2> /dev/null | grep -q "ok installed"; }
    ;;
  dnf)
    program=(gcc-c++ make cmake cli11-devel json-devel pcre2-devel utf8proc-devel xxhash-devel zlib-devel libzstd-devel libedit-devel)
    tests=(gtest-devel openmpi-devel) arm=(gcc-c++-aarch64-linux-gnu qemu-user) browser=(chromium)
    install=(dnf install -y -q)
    is_installed() { rpm -q --whatprovides "$1" > /dev/null 2>&1; }
    ;;
  pacman)
    program=(gcc make cmake cli11 nlohmann-json pcre2 libutf8proc xxhash zlib zstd libedit)
    tests=(gtest openmpi) arm=(aarch64-linux-gnu-gcc qemu-user) browser=(chromium)
    install=(pacman -S --noconfirm --needed)
    is_installed() { pacman -T "$1" > /dev/null; }
    ;;
  brew) # brew refuses to run as root
    program=(libomp cmake cli11 nlohmann-json pcre2 utf8proc xxhash zlib zstd)
    tests=(googletest open-mpi) arm=() browser=(chromium) install=(brew install -q) sudo=""
    is_installed() { brew list --versions "$1" > /dev/null; }
    ;;
  none)
    cat >&2 << EOF
setup.sh knows apt-get, dnf, pacman and brew. On another system, install a C++20 compiler with OpenMP (g++ 12 or later),
make and CMake 3.22 or later. CMake fetches the libraries that are not installed. The tests need GoogleTest, several
processes an MPI.
EOF
    exit 2
    ;;
esac
[ $manager = apt-get ] || echo "setup: the package names for $manager are untested"
[ "$manager$which" != brew--arm ] || { echo "setup.sh: brew has no compiler for --arm; leave it out" >&2 && exit 2; }

packages=("${program[@]}")
[ "$which" = --program ] || packages+=("${tests[@]}")
[ "$which" != --arm ] || packages+=("${arm[@]}")
[ "$which" != --browser ] || packages+=("${browser[@]}")
missing=()
for package in "${packages[@]}"; do
  is_installed "$package" || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  echo "setup: everything is installed"
  exit 0
fi
if [ -n "$sudo" ] && ! command -v sudo > /dev/null; then
  echo "setup: run this as root, or install sudo: $manager needs it to install ${missing[*]}" >&2
  exit 2
fi
echo "setup: installing ${missing[*]}"
[ $manager != apt-get ] || $sudo apt-get update -qq
$sudo "${install[@]}" "${missing[@]}" > /dev/null
echo "setup: done"
