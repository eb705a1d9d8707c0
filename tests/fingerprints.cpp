// Prints the fingerprints of this machine, with the products of an instruction set if it is named. See
// scripts/fingerprints.sh.
#include "tests/fingerprints.h"

#include <cstdio>

int main(int count, char** arguments) {
  if (count == 2) streambp::cpu::use_instructions(arguments[1]);
  const auto print = [](const std::string& what, std::uint64_t fingerprint) {
    std::printf("%s %016llx\n", what.c_str(), static_cast<unsigned long long>(fingerprint));
  };
  for (const char* family : {"gpt2", "qwen3", "gemma3"}) streambp::for_each_fingerprint(family, print);
  print("products bf16 small", streambp::fingerprint_of_small_products());
}
