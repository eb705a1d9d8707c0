// Training data without a download: short stories from a small vocabulary.
//
// The opening says who left what where, and who owns how many things. The middle is filler. The end asks questions that
// only the opening answers. A model learns spelling first, then grammar, then some arithmetic, and finally long-range
// recall, which needs a context that includes the opening.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/random.h"

namespace streambp {

struct Story {
  struct Fact {  // Mia hid the green lamp in the barn.
    std::string person, verb, object, place;
  };
  std::vector<Fact> facts;  // in the order of the opening
  std::string text;         // opening, middle and end, one line each
};

namespace storytelling {

using List = std::vector<std::string>;

inline const List kGirls = {"Mia", "Nora", "Lily", "Ada", "Rosa", "Ida"};
inline const List kBoys = {"Tom", "Ben", "Max", "Sam", "Leo", "Finn"};
inline const List kVerbs = {"hid", "left", "put", "lost", "dropped", "kept"};
inline const List kLooks = {"red", "green", "blue", "white", "little", "old", "silver", "pretty"};
inline const List kObjects = {"lamp", "kite", "drum", "hat", "key", "book", "bell", "ball", "cup", "clock", "coat"};
inline const List kPlaces = {"in the barn",     "under the bridge", "behind the mill", "by the pond",
                             "on the roof",     "in the garden",    "under the bed",   "behind the house",
                             "by the well",     "on the hill",      "in the cave",     "under the stairs",
                             "behind the shed", "by the gate",      "in the boat",     "on the shelf"};
inline const List kThings = {"apples", "pears", "nuts", "eggs", "shells", "stones", "roses", "buttons", "cakes"};
inline const List kAnimals = {"cat", "dog", "goose", "fox", "goat", "pony"};
inline const List kTimes = {"One sunny morning", "One windy day", "On a cold night", "Last summer", "Long ago"};

// {A} and {B} are two of the people; {he}, {him} and {his} refer to {A}; {mine} is the object of {A}, {yours} that of
// {B}. {n} + {m} = {sum}.
inline const List kMiddles = {
    "{A} counted {n} {things} and {m} {others}, {sum} in all.",
    "{A} had {sum} {things} and gave {m} to {B}, so {he} had {n} left.",
    "{A} found {n} {things} and then {m} more, which made {sum}.",
    "{A} sang a song about the moon, and {B} danced.",
    "It began to rain, so {A} and {B} sat down under a big tree.",
    "{A} was hungry, so {B} gave {him} some bread.",
    "\"Where is the {yours}?\" asked {A}. \"I will not tell you,\" said {B}.",
    "{A} thought of the {mine} and smiled.",
    "{A} looked for the {yours} until {he} was tired.",
    "A {animal} came down the road and looked at {A}.",
    "{A} and {B} ran to the river to look for a {animal}.",
    "\"I had a dream about a {animal},\" said {A}, and {B} laughed.",
    "{A} made soup, and {B} ate two bowls of it.",
    "All was still, and only the wind sang.",
    "{A} told {B} a story about a king and his {animal}.",
    "{A} lost {his} shoe, but {B} soon found it.",
    "{A} fell asleep in the grass, and {B} was very quiet.",
};
inline const List kQuestions = {
    "Where was the {object}? {Place}, where {A} {verb} it.",
    "Who {verb} the {object} {place}? {A} did.",
    "What was {place}? The {object} that {A} {verb} there.",
};

// Random choices that depend only on the seed and the number.
class Dice {
 public:
  Dice(std::uint64_t seed, std::uint64_t number) : random_(seed, number) {}
  std::size_t between(std::size_t low, std::size_t high) { return low + random_.below(high - low + 1, rolls_++); }
  const std::string& one(const List& list) { return list[between(0, list.size() - 1)]; }
  // `count` different entries of a list, in random order.
  template <class T>
  std::vector<T> some(std::size_t count, std::vector<T> list) {
    for (std::size_t i = 0; i < count; ++i) std::swap(list[i], list[between(i, list.size() - 1)]);
    list.resize(count);
    return list;
  }

 private:
  Random random_;
  std::uint64_t rolls_ = 0;
};

using Words = std::map<std::string, std::string>;

// Replaces the {slots} of a sentence.
inline std::string fill(std::string sentence, const Words& words) {
  for (std::size_t open; (open = sentence.find('{')) != std::string::npos;) {
    const std::size_t close = sentence.find('}', open);
    sentence.replace(open, close - open + 1, words.at(sentence.substr(open + 1, close - open - 1)));
  }
  return sentence;
}

// {n} + {m} = {sum}
inline Words sum(Dice& dice) {
  const std::size_t n = dice.between(2, 12), m = dice.between(2, 12);
  return {{"n", std::to_string(n)}, {"m", std::to_string(m)}, {"sum", std::to_string(n + m)}};
}

// A sentence of the middle, about two of the people and about things that they do not own.
inline std::string passing_sentence(Dice& dice, const std::string& sentence, const std::vector<Story::Fact>& facts,
                                    const List& passing_things) {
  const auto pair = dice.some(2, facts);
  const auto &a = pair[0], &b = pair[1];
  const auto passing = dice.some(2, passing_things);
  const bool girl = std::find(kGirls.begin(), kGirls.end(), a.person) != kGirls.end();
  Words words = sum(dice);
  words.merge(Words{{"A", a.person}, {"mine", a.object}, {"B", b.person}, {"yours", b.object}});
  words.merge(Words{{"he", girl ? "she" : "he"}, {"him", girl ? "her" : "him"}, {"his", girl ? "her" : "his"}});
  words.merge(Words{{"things", passing[0]}, {"others", passing[1]}, {"animal", dice.one(kAnimals)}});
  return fill(sentence, words);
}

}  // namespace storytelling

// Story number `number` of this seed.
inline Story story(std::uint64_t seed, std::uint64_t number) {
  using namespace storytelling;
  Dice dice(seed, number);
  const std::size_t count = dice.between(2, 3);
  List people = kGirls;
  people.insert(people.end(), kBoys.begin(), kBoys.end());
  people = dice.some(count, people);
  const List objects = dice.some(count, kObjects), places = dice.some(count, kPlaces);
  const List things = dice.some(kThings.size(), kThings);  // the people own things[0]
  Words owned = sum(dice);
  owned.merge(Words{{"A", people[0]}, {"B", people[1]}, {"things", things[0]}});

  Story story;
  std::string opening = dice.one(kTimes) + ", ", middle, end;
  List questions = {fill("How many {things} did {A} and {B} have? {n} and {m}, {sum} in all. ", owned)};
  for (std::size_t i = 0; i < count; ++i) {
    story.facts.push_back({people[i], dice.one(kVerbs), dice.one(kLooks) + " " + objects[i], places[i]});
    const auto& [person, verb, object, place] = story.facts.back();
    const std::string answer = static_cast<char>(std::toupper(place[0])) + place.substr(1);
    const Words words = {{"A", person}, {"verb", verb}, {"object", object}, {"place", place}, {"Place", answer}};
    opening += fill("{A} {verb} the {object} {place}. ", words);
    questions.push_back(fill(dice.one(kQuestions), words) + " ");
  }
  opening += fill("{A} had {n} {things}, and {B} had {m}.", owned);

  for (const std::string& sentence : dice.some(dice.between(4, 8), kMiddles)) {
    if (!middle.empty()) middle += ' ';
    middle += passing_sentence(dice, sentence, story.facts, {things.begin() + 1, things.end()});
  }

  for (const std::string& question : dice.some(questions.size(), questions)) end += question;
  for (const std::string& person : people) end += "Good night, " + person + (person == people.back() ? "!" : "! ");
  story.text = opening + "\n" + middle + "\n" + end + "\n";
  return story;
}

// At least this many bytes of stories, separated by blank lines. A shorter text is a prefix of a longer one.
inline std::string stories(std::uint64_t seed, std::size_t bytes) {
  std::string text;
  for (std::uint64_t number = 0; text.size() < bytes; ++number) {
    if (number > 0) text += '\n';
    text += story(seed, number).text;
  }
  return text;
}

}  // namespace streambp
