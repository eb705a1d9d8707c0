// Example data that the program makes up, as JSON lines in the forms that training reads: to see what they look like,
// and to watch an objective at work without a download.
//
//   preferences   {"prompt", "chosen", "rejected"}     a question about somebody's things; two answers say the same, and
//                                                      the courteous one is preferred
//   answers       {"prompt", "completion"}             other such questions, answered courteously or curtly by the toss
//                                                      of a coin: a model that learns them has no manners to prefer yet
//   groups        {"prompt", "completions", "rewards"} other questions, each with some such answers; a reward of 1 for
//                                                      every courteous one, of 0 for the others
//   arithmetic    {"prompt", "completion", "answer"}   a sum of two numbers in which one is carried; the completion is what
//                                                      a pupil wrote who forgets that by the toss of a coin
#pragma once

#include <nlohmann/json.hpp>

#include "data/documents/stories.cuh"

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

// Every such sum once, before any comes again.
inline nlohmann::ordered_json arithmetic_example(std::uint64_t seed, std::uint64_t number) {
  constexpr std::uint64_t sums = 9 * 9 * 45;  // two numbers of two digits; the units come to ten at least
  const Random random(seed);
  const std::uint64_t step = 15 * random.below(200, 0) + 1;  // has no factor in common with their number
  std::uint64_t at = (random.below(sums, 1) + number % sums * step) % sums;
  const std::uint64_t a_tens = 1 + at / 45 / 9, b_tens = 1 + at / 45 % 9;
  at %= 45;
  std::uint64_t a_units = 1;  // goes with as many others
  for (; at >= a_units; ++a_units) at -= a_units;
  const std::uint64_t b_units = 9 - at, sum = 10 * (a_tens + b_tens) + a_units + b_units;
  const bool forgets = storytelling::Dice(seed, number).between(0, 1);
  return {{"prompt", std::to_string(10 * a_tens + a_units) + " + " + std::to_string(10 * b_tens + b_units) + " = "},
          {"completion", std::to_string(forgets ? sum - 10 : sum)},
          {"answer", std::to_string(sum)}};
}

}  // namespace streambp
