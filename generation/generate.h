// Completions of prompts, many at once.
#pragma once

#include <set>

#include "generation/generator.h"

namespace streambp {

struct GenerationSettings {
  Sampling sampling;
  Index length = 1;               // maximum number of tokens
  std::set<std::int32_t> stop{};  // tokens that end a sequence
  std::size_t first = 0;          // the number of the first prompt
};

enum class Ending { none, stop, length, room, text };  // text: on_token found a stop text

// The completion of a prompt, with its stop token if it has one.
struct Continuation {
  Tokens tokens;
  std::vector<double> logps;  // of the tokens, at temperature 1, on a CPU with the bits that training computes
  Ending end = Ending::none;
};

// A sequence being generated: the number of its prompt, its slot, and the tokens to read next.
struct Active {
  std::size_t number;
  Index slot;
  Tokens unread;
};

// Completes the prompts, as many in parallel as the generator has slots. When a sequence ends, the next prompt takes
// its slot. Calls on_token(prompt number, continuation) after every token; it may set the end. A completion depends on the
// prompt, its number and the seed, not on the other sequences.
template <class Device, class T, class F>
std::vector<Continuation> generate(Generator<Device, T>& generator, const std::vector<Tokens>& prompts,
                                   const GenerationSettings& s, F&& on_token) {
  std::vector<Continuation> texts(prompts.size());
  std::vector<Active> active;
  std::vector<Index> free;
  for (Index slot = generator.slots() - 1; slot >= 0; --slot) free.push_back(slot);
  std::size_t too_few = 0;  // free slots when there were too few pages for a prompt
  for (std::size_t next = 0; next < prompts.size() || !active.empty();) {
    // One at a time, so that later prompts can reuse a shared prefix.
    if (next < prompts.size() && free.size() > too_few) {
      const Index longest = std::min(generator.room, static_cast<Index>(prompts[next].size()) + s.length);
      const auto known = generator.start(free.back(), prompts[next], longest, free);
      require(known || !active.empty(), "the cache of keys and values has too few pages for prompt ", next + 1);
      too_few = known ? 0 : free.size();
      if (known) {
        active.push_back({next, free.back(), {prompts[next].begin() + *known, prompts[next].end()}});
        free.pop_back();
        ++next;
      }
    }
    std::vector<typename Generator<Device, T>::Reading> readings;
    for (const Active& a : active) readings.push_back({a.slot, a.unread, s.first + a.number});
    const std::vector<Draw> draws = generator.read(readings, s.sampling);
    std::vector<Active> still_active;
    const auto length_of = [&](const Active& a) { return static_cast<Index>(generator.text(a.slot).size()); };
    for (std::size_t i = 0; i < active.size(); ++i) {
      require(!draws[i].is_bad(), "prompt ", readings[i].completion + 1, ": the logit of token ", draws[i].bad_token(),
              " after position ", length_of(active[i]), " is ", draws[i].logp,
              "; are the weights damaged, or too large for this --dtype?");
    }
    for (std::size_t i = 0; i < active.size(); ++i) {
      Continuation& text = texts[active[i].number];
      const auto token = static_cast<std::int32_t>(draws[i].token);
      text.tokens.push_back(token);
      text.logps.push_back(draws[i].logp);
      text.end = s.stop.count(token) > 0                              ? Ending::stop
                 : static_cast<Index>(text.tokens.size()) == s.length ? Ending::length
                 : length_of(active[i]) == generator.room             ? Ending::room
                                                                      : Ending::none;
      on_token(active[i].number, text);
      if (text.end == Ending::none) {
        still_active.push_back({active[i].number, active[i].slot, {token}});
      } else {
        free.push_back(active[i].slot);
      }
    }
    active = std::move(still_active);
  }
  return texts;
}

}  // namespace streambp
