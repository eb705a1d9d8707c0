// The order of every sum and all elementary functions are the program's own, so a gradient has the same bits on every
// processor. If a change of the arithmetic is intended, scripts/fingerprints.sh --update writes the new values; the one
// in README.md and docs/verification.md changes, too.
#include "tests/fingerprints.h"

#include <fstream>

#include "tests/support.cuh"

namespace streambp {
namespace {

class Fingerprint : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Families, Fingerprint,
                         testing::ValuesIn(sized<std::vector<const char*>>({"gpt2", "qwen3", "gemma3"}, {"gpt2"})),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(Fingerprint, IsTheSameOnEveryMachine) {
  std::ifstream file(STREAMBP_SOURCE "/tests/golden/fingerprints.txt");
  std::map<std::string, std::string> expected;
  for (std::string family, dtype, what; file >> family >> dtype >> what;)
    file >> expected[family + " " + dtype + " " + what];
  for_each_fingerprint(GetParam(), [&](const std::string& what, std::uint64_t fingerprint) {
    char digits[17];
    std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(fingerprint));
    EXPECT_EQ(digits, expected[what]) << what;
  });
}

}  // namespace
}  // namespace streambp
