// The order of every sum and all elementary functions are the program's own, so a gradient has the same bits on every
// processor. If a change of the arithmetic is intended, scripts/fingerprints.sh --update writes the new values; the one
// in README.md and docs/verification.md changes, too.
#include "tests/fingerprints.h"

#include <fstream>

#include "tests/support.cuh"

namespace streambp {
namespace {

class Fingerprint : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(
    Families, Fingerprint,
    testing::ValuesIn(sized<std::vector<const char*>>({"gpt2", "qwen3", "gemma3", "lfm2", "qwen3_5"}, {"gpt2"})),
    [](const auto& info) { return std::string(info.param); });

void expect_fingerprint(const std::string& what, std::uint64_t fingerprint) {
  std::ifstream file(STREAMBP_SOURCE "/tests/golden/fingerprints.txt");
  std::map<std::string, std::string> expected;
  for (std::string family, dtype, name; file >> family >> dtype >> name;)
    file >> expected[family + " " + dtype + " " + name];
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(fingerprint));
  EXPECT_EQ(digits, expected[what]) << what;
}

TEST_P(Fingerprint, IsTheSameOnEveryMachine) { for_each_fingerprint(GetParam(), expect_fingerprint); }

TEST(Fingerprints, OfSmallProductsIsTheSameOnEveryMachine) {
  expect_fingerprint("products bf16 small", fingerprint_of_small_products());
}

}  // namespace
}  // namespace streambp
