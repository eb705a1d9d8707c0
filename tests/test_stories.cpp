// The stories: a parser that knows only their grammar checks the sums, and every answer against the opening.
#include <gtest/gtest.h>

#include <set>
#include <tuple>

#include "data/documents/stories.h"
#include "tests/temporary.h"

namespace streambp {
namespace {

using Words = std::vector<std::string>;

bool in_word(char c) { return std::isalnum(static_cast<unsigned char>(c)); }

// Removes every match of a pattern from the text and returns the words in its gaps, "_".
std::vector<Words> take_all(std::string& text, const std::string& pattern) {
  std::vector<Words> found;
  std::string rest;
  for (std::size_t begin = 0; begin < text.size();) {
    Words words;
    std::size_t at = begin, p = 0;
    const bool inside = begin > 0 && in_word(text[begin]) && in_word(text[begin - 1]);
    for (; !inside && p < pattern.size() && at < text.size(); ++p) {
      const std::size_t from = at;
      if (pattern[p] == '_') {
        while (at < text.size() && in_word(text[at])) ++at;
        words.push_back(text.substr(from, at - from));
      } else if (text[at] == pattern[p]) {
        ++at;
      }
      if (at == from) break;
    }
    if (p == pattern.size()) {
      found.push_back(words);
      begin = at;
    } else {
      rest += text[begin++];
    }
  }
  text = rest;
  return found;
}
std::vector<Words> find_all(std::string text, const std::string& pattern) { return take_all(text, pattern); }

std::vector<std::string> split(const std::string& text, const std::string& separator) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  for (std::size_t end; (end = text.find(separator, begin)) != std::string::npos; begin = end + separator.size()) {
    parts.push_back(text.substr(begin, end - begin));
  }
  parts.push_back(text.substr(begin));
  return parts;
}

std::string lower_first(std::string text) {
  text[0] = static_cast<char>(std::tolower(text[0]));
  return text;
}

const std::string& a_million_bytes() {
  static const std::string text = stories(17, 1'000'000);
  return text;
}

TEST(Stories, AFunctionOfTheSeed) {
  EXPECT_EQ(stories(17, 1'000'000), a_million_bytes());
  EXPECT_NE(stories(18, 1'000), stories(17, 1'000));
  EXPECT_TRUE(a_million_bytes().starts_with(stories(17, 5'000)));
  EXPECT_EQ(stories(5, 0), "");
  for (const std::size_t bytes : {1, 100, 12'345}) {
    EXPECT_GE(stories(5, bytes).size(), bytes);
    EXPECT_LT(stories(5, bytes).size(), bytes + 1'000);
  }
  const std::string opening =  // the same on every machine
      "Long ago, Lily lost the blue key under the stairs. Ida put the old lamp by the gate. ";
  EXPECT_TRUE(a_million_bytes().starts_with(opening)) << a_million_bytes().substr(0, 300);
}

TEST(Stories, ArePlainText) {
  for (const char c : a_million_bytes()) ASSERT_TRUE(c == '\n' || (c >= ' ' && c <= '~')) << static_cast<int>(c);
  EXPECT_EQ(a_million_bytes().find_first_of("{}"), std::string::npos);
  std::set<std::string> documents;
  for (const std::string& document : split(a_million_bytes(), "\n\n"))
    EXPECT_TRUE(documents.insert(document).second) << "told twice: " << document;
  EXPECT_GT(documents.size(), 1'000u);
}

TEST(Stories, SumsAreRight) {
  struct Pattern {
    std::string text;
    int whole, part, other;  // which of its gaps hold whole = part + other
  };
  for (const auto& [text, whole, part, other] :
       {Pattern{"counted _ _ and _ _, _ in all.", 4, 0, 2},
        Pattern{"found _ _ and then _ more, which made _.", 3, 0, 2}, Pattern{"have? _ and _, _ in all.", 2, 0, 1},
        Pattern{"had _ _ and gave _ to _, so _ had _ left.", 0, 2, 5}}) {
    const auto found = find_all(a_million_bytes(), text);
    EXPECT_GT(found.size(), 100u) << text;
    for (const Words& w : found) EXPECT_EQ(std::stoi(w[whole]), std::stoi(w[part]) + std::stoi(w[other])) << text;
  }
}

TEST(Stories, EveryAnswerFollowsFromItsOpening) {
  for (std::uint64_t number = 0; number < 2'000; ++number) {
    const Story told = story(3, number);
    SCOPED_TRACE(told.text);
    const Words lines = split(told.text, "\n");
    ASSERT_EQ(lines.size(), 4u);  // opening, middle, end, and nothing after the last line break

    // What the opening says: person, verb, look, object, preposition, place.
    const auto facts = find_all(lines[0], "_ _ the _ _ _ the _.");
    const auto owners = find_all(lines[0], "_ had _ _, and _ had _.");
    ASSERT_EQ(owners.size(), 1u);
    ASSERT_EQ(facts.size(), told.facts.size());
    std::set<std::string> people, objects, places;
    std::string good_night;
    for (std::size_t i = 0; i < facts.size(); ++i) {
      const auto& [person, verb, object, place] = told.facts[i];
      const Words& w = facts[i];
      EXPECT_EQ(std::tie(person, verb), std::tie(w[0], w[1]));
      EXPECT_EQ(object, w[2] + " " + w[3]);
      EXPECT_EQ(place, w[4] + " the " + w[5]);
      people.insert(w[0]), objects.insert(w[3]), places.insert(w[5]);
      good_night += "Good night, " + w[0] + (i + 1 < facts.size() ? "! " : "!");
    }
    EXPECT_EQ(people.size() + objects.size() + places.size(), 3 * facts.size());  // so that answers are unique

    std::string end = lines[2];
    std::multiset<Words> answers;  // in the words of the opening
    for (const Words& w : take_all(end, "Where was the _ _? _ the _, where _ _ it. ")) {
      answers.insert({w[4], w[5], w[0], w[1], lower_first(w[2]), w[3]});
    }
    for (const Words& w : take_all(end, "Who _ the _ _ _ the _? _ did. ")) {
      answers.insert({w[5], w[0], w[1], w[2], w[3], w[4]});
    }
    for (const Words& w : take_all(end, "What was _ the _? The _ _ that _ _ there. ")) {
      answers.insert({w[4], w[5], w[2], w[3], w[0], w[1]});
    }
    EXPECT_EQ(answers, std::multiset<Words>(facts.begin(), facts.end()));  // each asked once, each answer right
    const auto sums = take_all(end, "How many _ did _ and _ have? _ and _, _ in all. ");
    ASSERT_EQ(sums.size(), 1u);
    EXPECT_EQ(owners[0], (Words{sums[0][1], sums[0][3], sums[0][0], sums[0][2], sums[0][4]}));
    EXPECT_EQ(end, good_night);  // and there was nothing else

    for (const auto* mention : {"thought of the _ _ and", "Where is the _ _?", "looked for the _ _ until"}) {
      for (const Words& w : find_all(lines[1], mention)) {
        EXPECT_PRED2(contains, lines[0], "the " + w[0] + " " + w[1] + " ") << w[0] << " " << w[1];
      }
    }
  }
}

}  // namespace
}  // namespace streambp
