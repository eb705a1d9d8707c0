// The example data, read by someone who knows only its form: every answer follows from its question, and every line is
// one that training reads.
#include "../data/examples.cuh"

#include <gtest/gtest.h>

#include <regex>
#include <set>

#include "../data/jsonl.cuh"

namespace streambp {
namespace {

constexpr std::uint64_t kCount = 400;

bool among(const storytelling::List& list, const std::string& text) {
  return std::find(list.begin(), list.end(), text) != list.end();
}

// What a completion says after the right answer to its question: whose thing was where.
std::string phrase(const std::string& prompt, const std::string& completion) {
  static const std::regex question(R"((\w+) (\w+) the (\w+ \w+) (\w+ the \w+)\. Where was the (\w+ \w+)\? )"),
      answer(R"((\w+ the \w+), where (\w+) (\w+) it\. (.+))");
  std::smatch q, a;
  EXPECT_TRUE(std::regex_match(prompt, q, question)) << prompt;
  EXPECT_TRUE(std::regex_match(completion, a, answer)) << completion;
  if (q.empty() || a.empty()) return "";
  EXPECT_EQ(q[3], q[5]) << prompt;
  std::string place = q[4];
  place[0] = static_cast<char>(std::toupper(place[0]));
  EXPECT_EQ(a[1].str() + " " + a[2].str() + " " + a[3].str(), place + " " + q[1].str() + " " + q[2].str())
      << completion;
  return a[4];
}

TEST(Examples, TheChosenAnswerIsCourteousTheRejectedCurtAndBothAreRight) {
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const Example example = parse_example(preference_example(3, i).dump());
    ASSERT_EQ(example.kind, Example::preference);
    const Example &chosen = example.sides[0], &rejected = example.sides[1];
    EXPECT_TRUE(among(storytelling::kCourteous, phrase(chosen.prompt, chosen.written))) << chosen.written;
    EXPECT_TRUE(among(storytelling::kCurt, phrase(rejected.prompt, rejected.written))) << rejected.written;
  }
}

TEST(Examples, AnswersAreRightAndOfEitherKind) {
  std::uint64_t courteous = 0;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const Example example = parse_example(answer_example(3, i).dump());
    ASSERT_EQ(example.kind, Example::completion);
    const std::string said = phrase(example.prompt, example.written);
    EXPECT_NE(among(storytelling::kCourteous, said), among(storytelling::kCurt, said)) << said;
    courteous += among(storytelling::kCourteous, said);
  }
  EXPECT_NEAR(static_cast<double>(courteous) / kCount, 0.5, 0.1);  // four standard deviations
}

TEST(Examples, SumsAreRight) {
  static const std::regex sum(R"((\d+) \+ (\d+) = )");
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const auto line = arithmetic_example(3, i);
    const Example example = parse_example(line.dump());
    ASSERT_EQ(example.kind, Example::completion);
    std::smatch terms;
    ASSERT_TRUE(std::regex_match(example.prompt, terms, sum)) << example.prompt;
    EXPECT_EQ(example.written, std::to_string(std::stoi(terms[1]) + std::stoi(terms[2]))) << example.prompt;
    EXPECT_EQ(line["answer"], example.written);
  }
}

TEST(Examples, AreDecidedBySeedAndNumberAndTheKindsAskOtherQuestions) {
  for (const auto& make : {preference_example, answer_example, arithmetic_example}) {
    EXPECT_EQ(make(3, 7), make(3, 7));
    EXPECT_NE(make(3, 7), make(3, 8));
    EXPECT_NE(make(3, 7), make(4, 7));
  }
  std::set<std::string> asked;
  std::uint64_t again = 0;
  for (std::uint64_t i = 0; i < kCount; ++i) asked.insert(preference_example(3, i)["prompt"]);
  for (std::uint64_t i = 0; i < kCount; ++i) again += asked.contains(answer_example(3, i)["prompt"]);
  EXPECT_LT(again, kCount / 20);  // there are 101 376 questions
}

}  // namespace
}  // namespace streambp
