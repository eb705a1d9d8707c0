// Generating text: the forward pass of the walk, with the keys and values of what was read kept.
//
// Several texts grow at once, each in a slot. The keys and values of all slots are one stream of documents laid end to
// end, with room to grow: slot s owns its rows [s * room, (s + 1) * room). A step reads some tokens of each slot: one
// where a text goes on, many where it begins. Their rows stand together in one chunk, so that every projection is one
// product of matrices; only attention takes the slots one by one, each with its own keys and values.
#pragma once

#include <algorithm>
#include <set>
#include <span>
#include <vector>

#include "model/sampling.cuh"
#include "streambp.cuh"

namespace streambp {

using Tokens = std::vector<std::int32_t>;

inline std::size_t index(Index i) { return static_cast<std::size_t>(i); }

template <class Device, class T>
class Generator {
 public:
  // What a slot reads next: one token or more.
  struct Reading {
    Index slot;
    std::span<const std::int32_t> tokens;
  };

  // Room for `slots` texts of up to `room` tokens each, read up to `chunk` tokens at a time.
  Generator(Device& dev, const Model<T>& model, Index slots, Index room, Index chunk)
      : room(room),
        dev(dev),
        c(model.config),
        chunk(std::min(chunk, slots * room)),
        scope(dev.scope()),
        stream(allocate_step()),
        walk(dev, model, stream, Schedule{Keep::nothing, kTile, kTile}),
        texts(static_cast<std::size_t>(slots)) {
    require(c.positions == Positions::rope || room <= c.max_length, "a text of ", room, " tokens is longer than the ",
            c.max_length, " positions that the model has learned");
    auto matrix = [&] { return dev.template allocate<T>(slots * room, c.kv_width(), Kind::keys_values); };
    for (Index l = 0; l < c.layers; ++l) cache.push_back({matrix(), matrix()});
    dev.upload(stream.key_begin, std::vector<std::int32_t>(static_cast<std::size_t>(room)).data());
  }

  const Index room;
  Index steps = 0;  // calls of read
  Index slots() const { return static_cast<Index>(texts.size()); }

  // The tokens that a slot has read.
  const Tokens& text(Index slot) const { return texts[index(slot)]; }

  // Each slot, named once at most, reads its tokens after those it has read. Returns the logits that follow the last of
  // each: a row of the vocabulary's size for each reading.
  std::vector<T> read(const std::vector<Reading>& readings) {
    ++steps;
    auto scope = dev.scope();
    const Matrix<T> last = dev.template allocate<T>(static_cast<Index>(readings.size()), c.hidden, Kind::chunk);
    std::vector<Piece> pieces;
    Index filled = 0;
    auto read_pieces = [&] {
      read_chunk(pieces, filled, last);
      pieces.clear();
      filled = 0;
    };
    for (std::size_t i = 0; i < readings.size(); ++i) {
      const auto& [slot, tokens] = readings[i];
      check(slot, tokens);
      for (std::size_t begin = 0; begin < tokens.size();) {
        const auto part = tokens.subspan(begin, std::min(tokens.size() - begin, index(chunk - filled)));
        begin += part.size();
        pieces.push_back({slot, part, filled, begin == tokens.size() ? static_cast<Index>(i) : -1});
        filled += pieces.back().size();
        if (filled == chunk) read_pieces();
      }
    }
    if (filled > 0) read_pieces();
    return to_host(dev, walk.logits(last));
  }

  // Leaves in the slot the longest beginning of `text` that any slot has read, and returns its length: the rest is to be
  // read. The last token always is, since what follows it is wanted.
  Index recall(Index slot, std::span<const std::int32_t> text) {
    Index best = slot, longest = shared(slot, text);
    for (Index other = 0; other < slots(); ++other) {
      if (shared(other, text) > longest) best = other, longest = shared(other, text);
    }
    auto copy = [&](Matrix<T> m) { dev.copy(rows_of(m, slot, {0, longest}), rows_of(m, best, {0, longest})); };
    for (const KeysValues<T>& kv : cache) {
      if (best != slot && longest > 0) copy(kv.k), copy(kv.v);
    }
    texts[index(slot)].assign(text.begin(), text.begin() + longest);
    return longest;
  }

  // A step as large as any, for the Plan device.
  void plan() {
    const Tokens tokens(index(std::min(room, ceil_div(chunk, slots()))));
    std::vector<Reading> readings;
    for (Index slot = 0; slot < slots(); ++slot) readings.push_back({slot, tokens});
    read(readings);
  }

 private:
  // Tokens of one slot that are read in one chunk, from its row `begin` on; the last row goes to row `reading` of the
  // step's result, unless there is more to come (-1).
  struct Piece {
    Index slot;
    std::span<const std::int32_t> tokens;
    Index begin, reading;
    Index size() const { return static_cast<Index>(tokens.size()); }
    Rows rows() const { return {begin, begin + size()}; }
  };

  // The stream that the walk sees: the tokens of a step, and for attention a document that begins at row 0.
  Stream allocate_step() {
    auto numbers = [&](Index n) { return dev.template allocate<std::int32_t>(1, n, Kind::stream); };
    return {.tokens = numbers(chunk),
            .targets = {},
            .positions = numbers(chunk),
            .key_begin = numbers(room),
            .rows_by_token = {},
            .rows_by_position = {}};
  }

  void check(Index slot, std::span<const std::int32_t> tokens) const {
    require(!tokens.empty(), "there is no token to read");
    require(static_cast<Index>(text(slot).size() + tokens.size()) <= room, "the text is longer than the ", room,
            " tokens it was given room for");
    for (std::int32_t token : tokens) {
      require(0 <= token && token < c.vocab, "token ", token, " is outside the model's vocabulary of ", c.vocab);
    }
  }

  Index shared(Index slot, std::span<const std::int32_t> text) const {
    const Tokens& own = texts[index(slot)];
    const std::size_t most = std::min(own.size(), text.empty() ? 0 : text.size() - 1);
    return std::mismatch(own.begin(), own.begin() + static_cast<std::ptrdiff_t>(most), text.begin()).first -
           own.begin();
  }

  Matrix<T> rows_of(Matrix<T> m, Index slot, Rows rows) const {
    return m.slice({slot * room + rows.begin, slot * room + rows.end});
  }

  void read_chunk(const std::vector<Piece>& pieces, Index count, Matrix<T> last) {
    const Rows all = {0, count};
    upload(pieces, all);
    auto scope = dev.scope();
    const Matrix<T> x = dev.template allocate<T>(count, c.hidden, Kind::chunk);
    const Activations<T> a = walk.allocate_activations(count);
    auto matrix = [&] { return dev.template allocate<T>(count, c.kv_width(), Kind::chunk); };
    const KeysValues<T> kv = {matrix(), matrix()};
    walk.embed(x, all);
    for (Index l = 0; l < c.layers; ++l) {
      walk.begin_layer(l, x, kv, a, all);
      for (const Piece& piece : pieces) attend(l, piece, kv, a);
      walk.finish_layer(l, x, x, a);
    }
    for (const Piece& piece : pieces) {
      Tokens& text = texts[index(piece.slot)];
      text.insert(text.end(), piece.tokens.begin(), piece.tokens.end());
      if (piece.reading < 0) continue;
      dev.copy(last.slice({piece.reading, piece.reading + 1}), x.slice({piece.rows().end - 1, piece.rows().end}));
    }
  }

  void upload(const std::vector<Piece>& pieces, Rows all) {
    Tokens tokens, positions;
    for (const Piece& piece : pieces) {
      tokens.insert(tokens.end(), piece.tokens.begin(), piece.tokens.end());
      for (Index i = 0; i < piece.size(); ++i) {
        positions.push_back(static_cast<std::int32_t>(text(piece.slot).size()) + static_cast<std::int32_t>(i));
      }
    }
    dev.upload(stream.tokens.columns(0, all.end), tokens.data());
    dev.upload(stream.positions.columns(0, all.end), positions.data());
  }

  // Puts the keys and values of a piece behind those of its slot, and attends to all of them.
  void attend(Index l, const Piece& piece, KeysValues<T> kv, const Activations<T>& a) {
    const auto length = static_cast<Index>(text(piece.slot).size());
    const Rows rows = {length, length + piece.size()};
    const KeysValues<T>& all = cache[index(l)];
    dev.copy(rows_of(all.k, piece.slot, rows), kv.k.slice(piece.rows()));
    dev.copy(rows_of(all.v, piece.slot, rows), kv.v.slice(piece.rows()));
    Activations<T> part;
    part.q = a.q.slice(piece.rows());
    part.attended = a.attended.slice(piece.rows());
    part.lse = a.lse.slice(piece.rows());
    const Rows slot = {0, room};
    walk.attend(l, {rows_of(all.k, piece.slot, slot), rows_of(all.v, piece.slot, slot)}, part, rows);
  }

  Device& dev;
  const Config& c;
  const Index chunk;
  decltype(std::declval<Device&>().scope()) scope;
  Stream stream;
  Walk<Device, T> walk;
  std::vector<KeysValues<T>> cache;  // of each layer
  std::vector<Tokens> texts;
};

// What weights and a generator take together.
template <class T>
std::size_t generation_memory(const Config& c, Index slots, Index room, Index chunk) {
  Plan dev;
  Model<T> model{c, Tensors<T>(c)};
  allocate(dev, table(c, model.weights), Kind::weights);
  Generator<Plan, T>(dev, model, slots, room, chunk).plan();
  return dev.arena.peak();
}

struct GenerationSettings {
  Sampling sampling;
  Index length = 1;               // tokens at most
  std::set<std::int32_t> stop{};  // tokens that end a text
};

enum class Ending { none, stop, length, room };

// What followed a prompt, with the token that ended it, if one did.
struct Continuation {
  Tokens tokens;
  double logp = 0;  // of all of them, at temperature 1
  Ending end = Ending::none;
};

// A text that is growing: its number among the prompts, its slot, and what is to be read next.
struct Active {
  std::size_t number;
  Index slot;
  Tokens unread;
};

template <class T>
void require_finite(std::span<const T> logits, std::size_t text, std::size_t position) {
  const auto bad =
      std::find_if(logits.begin(), logits.end(), [](T x) { return !std::isfinite(static_cast<float>(x)); });
  if (bad == logits.end()) return;
  fail("text ", text + 1, ": the logit of token ", bad - logits.begin(), " after position ", position, " is ",
       static_cast<float>(*bad), "; are the weights damaged, or too large for this --dtype?");
}

// A draw from each row of logits, by its text's own random numbers: one for each position.
template <class T>
std::vector<Draw> draw_rows(std::span<const T> logits, const std::vector<Active>& active,
                            const std::vector<std::size_t>& positions, const Sampling& s) {
  const std::size_t vocabulary = logits.size() / active.size();
  std::vector<Draw> draws(active.size());
  auto row = [&](std::size_t i) { return logits.subspan(i * vocabulary, vocabulary); };
  for (std::size_t i = 0; i < active.size(); ++i) require_finite(row(i), active[i].number, positions[i]);
#pragma omp parallel for if (active.size() > 1)
  for (std::size_t i = 0; i < active.size(); ++i) {
    draws[i] = draw(row(i), s, Random(s.seed, active[i].number).uniform(positions[i]));
  }
  return draws;
}

// Continues the prompts, as many at once as the generator has slots: when a text ends, another one takes its slot. Calls
// on_token(number of the prompt, its continuation) after every token. What a text becomes depends on its number and the
// seed, not on the texts beside it.
template <class Device, class T, class F>
std::vector<Continuation> generate(Generator<Device, T>& generator, const std::vector<Tokens>& prompts,
                                   const GenerationSettings& s, F&& on_token) {
  std::vector<Continuation> texts(prompts.size());
  std::vector<Active> active;
  std::vector<Index> free;
  for (Index slot = generator.slots() - 1; slot >= 0; --slot) free.push_back(slot);
  for (std::size_t next = 0; next < prompts.size() || !active.empty();) {
    if (next < prompts.size() && !free.empty()) {  // one at a time, so that the next one finds what it shares with it
      const Index known = generator.recall(free.back(), prompts[next]);
      active.push_back({next, free.back(), {prompts[next].begin() + known, prompts[next].end()}});
      free.pop_back();
      ++next;
    }
    std::vector<typename Generator<Device, T>::Reading> readings;
    for (const Active& a : active) readings.push_back({a.slot, a.unread});
    const std::vector<T> logits = generator.read(readings);
    std::vector<std::size_t> lengths;
    for (const Active& a : active) lengths.push_back(generator.text(a.slot).size());
    const std::vector<Draw> draws = draw_rows<T>(logits, active, lengths, s.sampling);
    std::vector<Active> going_on;
    for (std::size_t i = 0; i < active.size(); ++i) {
      Continuation& text = texts[active[i].number];
      const std::int32_t token = draws[i].token;
      text.tokens.push_back(token);
      text.logp += draws[i].logp;
      text.end = s.stop.count(token) > 0                              ? Ending::stop
                 : static_cast<Index>(text.tokens.size()) == s.length ? Ending::length
                 : static_cast<Index>(lengths[i]) == generator.room   ? Ending::room
                                                                      : Ending::none;
      if (text.end == Ending::none) {
        going_on.push_back({active[i].number, active[i].slot, {token}});
      } else {
        free.push_back(active[i].slot);
      }
      on_token(active[i].number, text);
    }
    active = std::move(going_on);
  }
  return texts;
}

}  // namespace streambp
