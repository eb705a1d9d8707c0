// Generated example data: JSON lines in the formats that training reads. They document the formats and demonstrate the
// objectives without a download. Polite answers are preferred to curt ones; of `answers`, data for the reference model,
// half are polite; in `arithmetic`, half of the completions forget the carry.
#pragma once

#include <nlohmann/json.hpp>

#include "data/documents/stories.h"

namespace streambp {

namespace storytelling {

inline const List kPolite = {"Thank you for asking!", "I am glad to help.", "It is kind of you to ask.",
                             "Please take good care of it.", "With pleasure!"};
inline const List kCurt = {"Do not ask again.", "Now go away.", "Why should I tell you?", "That is not your business.",
                           "Leave me alone!"};

struct Question {
  std::string prompt, answer;
};

// "Where was the ...?"
inline Question question(Dice& dice) {
  const std::string who = dice.one(dice.between(0, 1) ? kGirls : kBoys),
                    what = dice.one(kLooks) + " " + dice.one(kObjects), verb = dice.one(kVerbs);
  std::string where = dice.one(kPlaces);
  const std::string prompt = who + " " + verb + " the " + what + " " + where + ". Where was the " + what + "? ";
  where[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(where[0])));
  return {prompt, where + ", where " + who + " " + verb + " it. "};
}

}  // namespace storytelling

// Each example depends only on the seed and its number.
inline nlohmann::ordered_json preference_example(std::uint64_t seed, std::uint64_t number) {
  using namespace storytelling;
  Dice dice(seed, number);
  const auto [prompt, answer] = question(dice);
  return {{"prompt", prompt}, {"chosen", answer + dice.one(kPolite)}, {"rejected", answer + dice.one(kCurt)}};
}

// ~seed: different questions than in the preferences.
inline nlohmann::ordered_json answer_example(std::uint64_t seed, std::uint64_t number) {
  using namespace storytelling;
  Dice dice(~seed, number);
  const auto [prompt, answer] = question(dice);
  return {{"prompt", prompt}, {"completion", answer + dice.one(dice.between(0, 1) ? kPolite : kCurt)}};
}

inline nlohmann::ordered_json group_example(std::uint64_t seed, std::uint64_t number) {
  using namespace storytelling;
  Dice dice(mix(seed), number);
  const auto [prompt, answer] = question(dice);
  nlohmann::ordered_json line = {{"prompt", prompt}};
  for (std::size_t i = 0; i < 4; ++i) {
    const bool polite = dice.between(0, 1);
    line["completions"].push_back(answer + dice.one(polite ? kPolite : kCurt));
    line["rewards"].push_back(polite ? 1 : 0);
  }
  return line;
}

// Every sum appears once before any repeats.
inline nlohmann::ordered_json arithmetic_example(std::uint64_t seed, std::uint64_t number) {
  constexpr std::uint64_t sums = 9 * 9 * 45;  // of two two-digit numbers with units that add up to at least ten
  const Random random(seed);
  const std::uint64_t step = 15 * random.below(200, 0) + 1;  // coprime to `sums`
  std::uint64_t at = (random.below(sums, 1) + number % sums * step) % sums;
  const std::uint64_t a_tens = 1 + at / 45 / 9, b_tens = 1 + at / 45 % 9;
  at %= 45;
  std::uint64_t a_units = 1;  // `a_units` choices of the other units give a carry
  for (; at >= a_units; ++a_units) at -= a_units;
  const std::uint64_t b_units = 9 - at, sum = 10 * (a_tens + b_tens) + a_units + b_units;
  const bool forgets = storytelling::Dice(seed, number).between(0, 1);
  return {{"prompt", std::to_string(10 * a_tens + a_units) + " + " + std::to_string(10 * b_tens + b_units) + " = "},
          {"completion", std::to_string(forgets ? sum - 10 : sum)},
          {"answer", std::to_string(sum)}};
}

}  // namespace streambp
