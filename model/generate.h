// Generation with a key/value cache.
//
// Several sequences grow at once, each in a slot. Slot s owns rows [s * room, (s + 1) * room) of the cache of every
// layer. A step reads new tokens of each slot: one for a sequence that is being generated, many for a prompt. Their
// rows form one chunk. So every operation runs once for all slots, and a GPU launches as many kernels for 64 slots as for
// one.
#pragma once

#include <algorithm>
#include <set>
#include <span>
#include <vector>

#include "memory/weights.h"
#include "model.cuh"
#include "model/sampling.h"

namespace streambp {

inline std::size_t index(Index i) { return static_cast<std::size_t>(i); }

template <class Device, class T>
class Generator {
 public:
  // The next tokens of a slot, at least one.
  struct Reading {
    Index slot;
    std::span<const std::int32_t> tokens;
  };

  // Holds `slots` sequences of up to `room` tokens each; reads at most `chunk` tokens at a time.
  Generator(Device& dev, const Model<T>& model, Index slots, Index room, Index chunk)
      : room(room),
        dev(dev),
        c(model.config),
        chunk(std::min(chunk, slots * room)),
        frequencies(c),
        weights(dev, model),
        scope(dev.scope()),
        table(allocate<std::int32_t>(dev, 1, 4 * this->chunk, Kind::stream)),
        key_begin(allocate<std::int32_t>(dev, 1, room, Kind::stream)),
        texts(static_cast<std::size_t>(slots)) {
    require(c.positions == Positions::rope || room <= c.max_length, "a sequence of ", room,
            " tokens is longer than the ", c.max_length, " positions of the model");
    require(c.rope_scaling.covers(room), "a sequence of ", room, " tokens is longer than the ", c.rope_scaling.longest,
            " that RoPE is scaled for");
    for (Index l = 0; l < c.layers; ++l) cache.push_back(allocate_keys_values<T>(dev, c, slots * room));
    dev.upload(key_begin, std::vector<std::int32_t>(static_cast<std::size_t>(room)).data());
  }

  const Index room;
  Index steps = 0;  // calls of read
  Index slots() const { return static_cast<Index>(texts.size()); }

  // The tokens in a slot's cache.
  const Tokens& text(Index slot) const { return texts[index(slot)]; }

  // Appends tokens to slots; each slot may occur once. Returns one row of logits per reading, after its last token. The
  // next call overwrites them.
  const std::vector<T>& read(const std::vector<Reading>& readings) {
    ++steps;
    auto scope = dev.scope();
    const Matrix<T> last = allocate<T>(dev, static_cast<Index>(readings.size()), c.hidden, Kind::chunk);
    Chunk next;
    Index done = 0;  // readings
    auto read_next = [&] {
      const Index ending = static_cast<Index>(next.ends.size());
      read_chunk(next, last.slice({done, done + ending}));
      done += ending;
      next = {};
    };
    for (const auto& [slot, tokens] : readings) check(slot, tokens);
    for (const auto& [slot, tokens] : readings) {
      for (std::size_t begin = 0; begin < tokens.size();) {
        const auto part = tokens.subspan(begin, std::min(tokens.size() - begin, index(chunk - next.rows())));
        begin += part.size();
        append(next, slot, part);
        if (begin == tokens.size()) next.ends.push_back(static_cast<std::int32_t>(next.rows() - 1));
        if (next.rows() == chunk) read_next();
      }
    }
    if (next.rows() > 0) read_next();
    const auto leased = weights.take_head();
    const Matrix<T> of_last = Head<Device, T>(dev, c, leased.weights).logits(last);
    logits.resize(index(of_last.size()));
    dev.download(logits.data(), of_last);
    return logits;
  }

  // Reuses the longest cached prefix of `text` found in any slot; returns its length. The caller reads the rest. The
  // last token is never reused, because its logits are needed.
  Index reuse_prefix(Index slot, std::span<const std::int32_t> text) {
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

  // The largest possible step, for the Plan device.
  void plan() {
    const Tokens tokens(index(std::min(room, ceil_div(chunk, slots()))));
    std::vector<Reading> readings;
    for (Index slot = 0; slot < slots(); ++slot) readings.push_back({slot, tokens});
    read(readings);
  }

 private:
  // The rows that are read at once: for each its token, its position, and the row of the cache where its slot begins.
  struct Chunk {
    std::vector<SequencePiece> pieces;
    Tokens tokens, positions, starts;
    Tokens ends;  // the last rows of the readings that end in this chunk
    Index rows() const { return static_cast<Index>(tokens.size()); }
  };

  void check(Index slot, std::span<const std::int32_t> tokens) const {
    require(!tokens.empty(), "no token to read");
    require(static_cast<Index>(text(slot).size() + tokens.size()) <= room, "the sequence is longer than its ", room,
            " tokens of cache");
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

  void append(Chunk& rows, Index slot, std::span<const std::int32_t> tokens) {
    Tokens& text = texts[index(slot)];
    const auto length = static_cast<Index>(text.size()), count = static_cast<Index>(tokens.size());
    rows.pieces.push_back({slot * room, {length, length + count}, rows.rows()});
    rows.tokens.insert(rows.tokens.end(), tokens.begin(), tokens.end());
    for (Index i = 0; i < count; ++i) rows.positions.push_back(static_cast<std::int32_t>(length + i));
    rows.starts.resize(rows.tokens.size(), static_cast<std::int32_t>(slot * room));
    text.insert(text.end(), tokens.begin(), tokens.end());
  }

  // ends: receives the hidden states of the last rows of readings.
  void read_chunk(const Chunk& rows, Matrix<T> ends) {
    const auto [tokens, last, sequences] = upload(rows);
    auto scope = dev.scope();
    const auto x = allocate<T>(dev, rows.rows(), c.hidden, Kind::chunk);
    const Activations<T> a = allocate_activations<T>(dev, c, Rows{0, rows.rows()});
    auto matrix = [&] { return allocate<T>(dev, rows.rows(), c.kv_width(), Kind::chunk); };
    const KeysValues<T> kv = {matrix(), matrix()};
    const Matrix<const std::int32_t> positions = sequences.index.positions;
    embedding(dev, x, {tokens, positions, {}, {}}, weights.take_embedding().weights.embedding, c.embedding_scale);
    for (Index l = 0; l < c.layers; ++l) {
      const auto leased = weights.take_layer(l, l + 1 < c.layers ? l + 1 : kNoLayer);
      TransformerLayer<Device, T> layer(dev, c, frequencies, l, leased.weights);
      layer.before_mixer(a, x);
      layer.mixer.project(a.mixer, kv, a.mixer_input, positions);
      layer.mixer.attend(a.mixer, kv, cache[index(l)], sequences);
      layer.after_mixer(x, a, x);
    }
    embedding(dev, ends, {last, last, {}, {}}, EmbeddingTables<T>{x, {}}, 1);  // row i is row last[i] of x
  }

  // A chunk on the device.
  struct Uploaded {
    Matrix<const std::int32_t> tokens, ends;
    SequenceRows sequences;
  };
  Uploaded upload(const Chunk& rows) {
    Tokens all;
    auto place = [&](const Tokens& numbers) {
      all.insert(all.end(), numbers.begin(), numbers.end());
      return table.columns(static_cast<Index>(all.size() - numbers.size()), static_cast<Index>(numbers.size()));
    };
    const SequenceIndex of_rows = {place(rows.starts), place(rows.positions)};
    const Uploaded uploaded = {place(rows.tokens), place(rows.ends), {rows.pieces, of_rows, {key_begin, {}}}};
    dev.upload(table.columns(0, static_cast<Index>(all.size())), all.data());
    return uploaded;
  }

  Device& dev;
  const Config& c;
  const Index chunk;
  const Frequencies frequencies;
  Weights<Device, T> weights;
  decltype(std::declval<Device&>().scope()) scope;
  const Matrix<std::int32_t> table;      // of the chunk that is read
  const Matrix<std::int32_t> key_begin;  // zeros: every slot is one document
  std::vector<KeysValues<T>> cache;      // of each layer
  std::vector<Tokens> texts;
  std::vector<T> logits;
};

struct GenerationSettings {
  Sampling sampling;
  Index length = 1;               // maximum number of tokens
  std::set<std::int32_t> stop{};  // tokens that end a sequence
  std::size_t first = 0;          // the number of the first prompt
};

enum class Ending { none, stop, length, room };

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

template <class T>
void require_finite(std::span<const T> logits, std::size_t text, std::size_t position) {
  const auto bad =
      std::find_if(logits.begin(), logits.end(), [](T x) { return !std::isfinite(static_cast<float>(x)); });
  if (bad == logits.end()) return;
  fail("prompt ", text + 1, ": the logit of token ", bad - logits.begin(), " after position ", position, " is ",
       static_cast<float>(*bad), "; are the weights damaged, or too large for this --dtype?");
}

// Samples from each row of logits. The random number depends only on the seed, the completion's number and the position.
template <class T>
std::vector<Draw> draw_rows(std::span<const T> logits, const std::vector<Active>& active,
                            const std::vector<std::size_t>& positions, const GenerationSettings& s) {
  const std::size_t vocabulary = logits.size() / active.size();
  std::vector<Draw> draws(active.size());
  auto row = [&](std::size_t i) { return logits.subspan(i * vocabulary, vocabulary); };
  for (std::size_t i = 0; i < active.size(); ++i) require_finite(row(i), s.first + active[i].number, positions[i]);
#pragma omp parallel for if (active.size() > 1)
  for (std::size_t i = 0; i < active.size(); ++i) {
    draws[i] = draw(row(i), s.sampling, Random(s.sampling.seed, s.first + active[i].number).uniform(positions[i]));
  }
  return draws;
}

// Completes the prompts, as many in parallel as the generator has slots. When a sequence ends, the next prompt takes
// its slot. Calls on_token(prompt number, continuation) after every token. A completion depends on the prompt, its
// number and the seed, not on the other sequences.
template <class Device, class T, class F>
std::vector<Continuation> generate(Generator<Device, T>& generator, const std::vector<Tokens>& prompts,
                                   const GenerationSettings& s, F&& on_token) {
  std::vector<Continuation> texts(prompts.size());
  std::vector<Active> active;
  std::vector<Index> free;
  for (Index slot = generator.slots() - 1; slot >= 0; --slot) free.push_back(slot);
  for (std::size_t next = 0; next < prompts.size() || !active.empty();) {
    if (next < prompts.size() && !free.empty()) {  // one at a time, so that later prompts can reuse a shared prefix
      const Index known = generator.reuse_prefix(free.back(), prompts[next]);
      active.push_back({next, free.back(), {prompts[next].begin() + known, prompts[next].end()}});
      free.pop_back();
      ++next;
    }
    std::vector<typename Generator<Device, T>::Reading> readings;
    for (const Active& a : active) readings.push_back({a.slot, a.unread});
    const std::vector<T>& logits = generator.read(readings);
    std::vector<std::size_t> lengths;
    for (const Active& a : active) lengths.push_back(generator.text(a.slot).size());
    const std::vector<Draw> draws = draw_rows<T>(logits, active, lengths, s);
    std::vector<Active> still_active;
    for (std::size_t i = 0; i < active.size(); ++i) {
      Continuation& text = texts[active[i].number];
      const std::int32_t token = draws[i].token;
      text.tokens.push_back(token);
      text.logps.push_back(draws[i].logp);
      text.end = s.stop.count(token) > 0                              ? Ending::stop
                 : static_cast<Index>(text.tokens.size()) == s.length ? Ending::length
                 : static_cast<Index>(lengths[i]) == generator.room   ? Ending::room
                                                                      : Ending::none;
      if (text.end == Ending::none) {
        still_active.push_back({active[i].number, active[i].slot, {token}});
      } else {
        free.push_back(active[i].slot);
      }
      on_token(active[i].number, text);
    }
    active = std::move(still_active);
  }
  return texts;
}

}  // namespace streambp
