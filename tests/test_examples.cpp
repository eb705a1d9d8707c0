// The example data: every answer is consistent with its question, and training can read every line.
#include "data/documents/examples.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <set>

#include "data/documents/jsonl.h"

namespace streambp {
namespace {

constexpr std::uint64_t kCount = 400;

bool among(const storytelling::List& list, const std::string& text) {
  return std::find(list.begin(), list.end(), text) != list.end();
}

// Checks that a completion answers its question, and returns the rest of it.
std::string phrase(const std::string& prompt, const std::string& completion) {
  // Mia hid the little book on the shelf. Where was the little book? On the shelf, where Mia hid it. With pleasure!
  char who[40], verb[40], look[40], thing[40], place[40], same_look[40], same_thing[40];
  EXPECT_EQ(std::sscanf(prompt.c_str(), "%39s %39s the %39s %39s %39[^.]. Where was the %39s %39[^?]? ", who, verb,
                        look, thing, place, same_look, same_thing),
            7)
      << prompt;
  EXPECT_STREQ(look, same_look);
  EXPECT_STREQ(thing, same_thing);
  place[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(place[0])));
  const std::string answer = std::string(place) + ", where " + who + " " + verb + " it. ";
  EXPECT_TRUE(completion.starts_with(answer)) << prompt << completion;
  return completion.substr(std::min(answer.size(), completion.size()));
}

TEST(Examples, PreferPoliteAnswersAndBothAreCorrect) {
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const Example example = parse_example(preference_example(3, i).dump());
    ASSERT_EQ(example.kind, Example::preference);
    const Example &chosen = example.sides[0], &rejected = example.sides[1];
    EXPECT_TRUE(among(storytelling::kPolite, phrase(chosen.prompt, chosen.written))) << chosen.written;
    EXPECT_TRUE(among(storytelling::kCurt, phrase(rejected.prompt, rejected.written))) << rejected.written;
  }
}

TEST(Examples, AnswersAreCorrectAndPoliteOrCurt) {
  std::uint64_t polite = 0;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const Example example = parse_example(answer_example(3, i).dump());
    ASSERT_EQ(example.kind, Example::completion);
    const std::string said = phrase(example.prompt, example.written);
    EXPECT_NE(among(storytelling::kPolite, said), among(storytelling::kCurt, said)) << said;
    polite += among(storytelling::kPolite, said);
  }
  EXPECT_NEAR(static_cast<double>(polite) / kCount, 0.5, 0.1);  // four standard deviations
}

TEST(Examples, RewardThePoliteAnswersOfAGroup) {
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const Example example = parse_example(group_example(3, i).dump());
    ASSERT_EQ(example.kind, Example::group);
    ASSERT_EQ(example.sides.size(), 4u);
    for (std::size_t j = 0; j < 4; ++j) {
      const std::string said = phrase(example.sides[j].prompt, example.sides[j].written);
      EXPECT_TRUE(among(example.rewards[j] == 1 ? storytelling::kPolite : storytelling::kCurt, said)) << said;
    }
  }
}

TEST(Examples, HalfOfTheSumsForgetTheCarry) {
  std::set<std::string> asked;
  std::uint64_t right = 0;
  for (std::uint64_t i = 0; i < 3645; ++i) {
    const auto line = arithmetic_example(3, i);
    const Example example = parse_example(line.dump());
    ASSERT_EQ(example.kind, Example::completion);
    int a = -1, b = -1;
    ASSERT_EQ(std::sscanf(example.prompt.c_str(), "%d + %d = ", &a, &b), 2) << example.prompt;
    EXPECT_TRUE(9 < a && a < 100 && 9 < b && b < 100 && a % 10 + b % 10 > 9) << example.prompt;
    EXPECT_EQ(line["answer"], std::to_string(a + b));
    EXPECT_TRUE(example.written == std::to_string(a + b) || example.written == std::to_string(a + b - 10))
        << example.prompt << example.written;
    right += example.written == line["answer"];
    asked.insert(example.prompt);
  }
  EXPECT_EQ(asked.size(), 3645u) << "each sum once";
  EXPECT_NEAR(static_cast<double>(right) / 3645, 0.5, 0.04);  // five standard deviations
}

TEST(Examples, DependOnSeedNumberAndKind) {
  for (const auto& make : {preference_example, answer_example, group_example, arithmetic_example}) {
    EXPECT_EQ(make(3, 7), make(3, 7));
    EXPECT_NE(make(3, 7), make(3, 8));
    EXPECT_NE(make(3, 7), make(4, 7));
  }
  std::set<std::string> asked;
  std::uint64_t again = 0;
  for (std::uint64_t i = 0; i < kCount; ++i) asked.insert(preference_example(3, i)["prompt"]);
  for (const auto& make : {answer_example, group_example}) {
    for (std::uint64_t i = 0; i < kCount; ++i) again += asked.contains(make(3, i)["prompt"]);
  }
  EXPECT_LT(again, kCount / 10);  // there are 101 376 questions
}

}  // namespace
}  // namespace streambp
