// Example data that the program makes up, as JSON lines in the forms that training reads: to see what they look like,
// and to watch an objective at work without a download.
//
//   preferences   {"prompt", "chosen", "rejected"}     a question about somebody's things; two answers say the same, and
//                                                      the courteous one is preferred
//   answers       {"prompt", "completion"}             other such questions, answered courteously or curtly by the toss
//                                                      of a coin: a model that learns them has no manners to prefer yet
//   groups        {"prompt", "completions", "rewards"} other questions, each with some such answers; a reward of 1 for
//                                                      every courteous one, of 0 for the others
//   arithmetic    {"prompt", "completion", "answer"}   a sum of two numbers
#pragma once

#include <nlohmann/json.hpp>

#include "stories.cuh"

namespace streambp {

namespace storytelling {

inline const List kCourteous = {"Thank you for asking!", "I am glad to help.", "It is kind of you to ask.",
                                "Please take good care of it.", "With pleasure!"};
inline const List kCurt = {"Do not ask again.", "Now go away.", "Why should I tell you?", "That is not your business.",
                           "Leave me alone!"};

struct Question {
  std::string prompt, answer;
};

// Where something was.
inline Question question(Dice& dice) {
  const std::string who = dice.one(dice.between(0, 1) ? kGirls : kBoys),
                    what = dice.one(kLooks) + " " + dice.one(kObjects), verb = dice.one(kVerbs);
  std::string where = dice.one(kPlaces);
  const std::string prompt = who + " " + verb + " the " + what + " " + where + ". Where was the " + what + "? ";
  where[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(where[0])));
  return {prompt, where + ", where " + who + " " + verb + " it. "};
}

}  // namespace storytelling

// The example of that number; the same for the same seed and number.
inline nlohmann::ordered_json preference_example(std::uint64_t seed, std::uint64_t number) {
  using namespace storytelling;
  Dice dice(seed, number);
  const auto [prompt, answer] = question(dice);
  return {{"prompt", prompt}, {"chosen", answer + dice.one(kCourteous)}, {"rejected", answer + dice.one(kCurt)}};
}

// Its dice are not those of preferences, so that learning these is not to have read the questions there.
inline nlohmann::ordered_json answer_example(std::uint64_t seed, std::uint64_t number) {
  using namespace storytelling;
  Dice dice(~seed, number);
  const auto [prompt, answer] = question(dice);
  return {{"prompt", prompt}, {"completion", answer + dice.one(dice.between(0, 1) ? kCourteous : kCurt)}};
}

inline nlohmann::ordered_json group_example(std::uint64_t seed, std::uint64_t number) {
  using namespace storytelling;
  Dice dice(mix(seed), number);
  const auto [prompt, answer] = question(dice);
  nlohmann::ordered_json line = {{"prompt", prompt}};
  for (std::size_t i = 0; i < 4; ++i) {
    const bool courteous = dice.between(0, 1);
    line["completions"].push_back(answer + dice.one(courteous ? kCourteous : kCurt));
    line["rewards"].push_back(courteous ? 1 : 0);
  }
  return line;
}

inline nlohmann::ordered_json arithmetic_example(std::uint64_t seed, std::uint64_t number) {
  // Steps of a length that has no common factor with 50 * 50 come to every pair of numbers once.
  const std::uint64_t step = 10 * Random(seed).below(999, 0) + 1237,
                      pair = (Random(seed).bits(1) % 2500 + number * step) % 2500;
  const std::uint64_t a = pair / 50, b = pair % 50;
  const std::string sum = std::to_string(a + b);
  return {{"prompt", std::to_string(a) + " + " + std::to_string(b) + " = "}, {"completion", sum}, {"answer", sum}};
}

}  // namespace streambp
