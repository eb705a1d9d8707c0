// Prints the fingerprints of this machine: all, or with the products of an instruction set, and of some families only.
//   fingerprints [INSTRUCTIONS [FAMILY...]]
// See scripts/fingerprints.sh.
#include "tests/fingerprints.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

int main(int count, char** arguments) {
  if (count > 1) streambp::cpu::use_instructions(arguments[1]);
  const auto print = [](const std::string& what, std::uint64_t fingerprint) {
    std::printf("%s %016llx\n", what.c_str(), static_cast<unsigned long long>(fingerprint));
  };
  std::vector<std::string> families = {"gpt2", "qwen3", "gemma3", "lfm2", "qwen3_5"};
  if (count > 2) families.assign(arguments + 2, arguments + count);
  for (const std::string& family : families) streambp::for_each_fingerprint(family, print);
  print("products bf16 small", streambp::fingerprint_of_small_products());
}
