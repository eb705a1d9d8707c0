// Generation with a key/value cache.
//
// Several sequences grow at once, each in a slot. The cache of every layer consists of pages, and a slot has a table of
// its pages, so the completions of a prompt hold its keys and values once. A step reads new tokens of each slot: one for
// a sequence that is being generated, many for a prompt. Their rows form one chunk. So every operation runs once for all
// slots, and a GPU launches about as many kernels for 64 slots as for one.
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "generation/page_tables.h"
#include "kernels/base/graph_cache.cuh"
#include "kernels/sampling.cuh"
#include "memory/weights.h"
#include "model.cuh"

namespace streambp {

inline std::size_t index(Index i) { return static_cast<std::size_t>(i); }

// Sequences generated in parallel, each up to `room` tokens, read up to `chunk` tokens at a time.
struct GenerationShape {
  Index slots = 0, room = 0, chunk = kTile;
  // Completions of each prompt; tokens of the longest prompt and of the longest completion.
  Index samples = 1, prompt = 0, completion = 0;

  Index pages_of_slot() const { return ceil_div(room, kPage); }
  // Of the cache. Completions share the whole pages before the last token of their prompt; their own tokens begin
  // anywhere in a page.
  Index pages() const {
    const Index all = slots * pages_of_slot();
    if (samples == 1) return all;
    return std::min(all, ceil_div(slots, samples) * ((prompt - 1) / kPage) + slots * (1 + ceil_div(completion, kPage)));
  }
};

template <class Device, class T>
class Generator {
 public:
  using A = Accumulator<T>;

  // The next tokens of a slot, at least one.
  struct Reading {
    Index slot;
    std::span<const std::int32_t> tokens;
    std::size_t completion = 0;  // its number, which chooses its random numbers
  };

  Generator(Device& dev, const Model<T>& model, const GenerationShape& shape)
      : room(shape.room),
        dev(dev),
        c(model.config),
        chunk(std::min(shape.chunk, shape.slots * room)),
        frequencies(c),
        weights(dev, model),
        scope(dev.scope()),
        table(allocate<std::int32_t>(dev, 1, 4 * chunk + 2 * shape.slots, Kind::stream)),
        tables(allocate<std::int32_t>(dev, shape.slots, shape.pages_of_slot(), Kind::stream)),
        key_begin(allocate<std::int32_t>(dev, 1, room, Kind::stream)),
        draws(allocate<Draw>(dev, 1, shape.slots, Kind::stream)),
        pages(shape.pages(), shape.slots),
        texts(index(shape.slots)),
        snapshot_at(index(shape.slots), -1) {
    require(c.positions == Positions::rope || room <= c.max_length, "a sequence of ", room,
            " tokens is longer than the ", c.max_length, " positions of the model");
    require(c.rope_scaling.covers(room), "a sequence of ", room, " tokens is longer than the ", c.rope_scaling.longest,
            " that RoPE is scaled for");
    for (Index l = 0; l < c.layers; ++l) {
      const SummaryShape summary = cache_shape(c, l);
      has_edges |= summary.edge > 0, has_states |= summary.state > 0;
      cache.push_back(
          allocate_summary<T>(dev, summary, summary.edge > 0 ? shape.slots * kTile : shape.pages() * kPage));
      snapshots.push_back(summary.edge > 0 ? allocate_summary<T>(dev, summary, shape.slots * kTile) : Summary<T>());
    }
    dev.upload(key_begin, std::vector<std::int32_t>(static_cast<std::size_t>(room)).data());
  }

  const Index room;
  Index steps = 0;  // calls of read
  Index slots() const { return static_cast<Index>(texts.size()); }

  // The tokens in a slot's cache.
  const Tokens& text(Index slot) const { return texts[index(slot)]; }

  // Appends tokens to slots; each slot may occur once. Returns one row of logits per reading, after its last token.
  std::vector<A> read(const std::vector<Reading>& readings) {
    std::vector<A> result;
    compute(readings, Repeated::no, [&](Matrix<A> logits, const DrawIndex&) {
      result.resize(index(logits.size()));
      dev.download(result.data(), logits);
    });
    return result;
  }

  // The same, but returns the token that is sampled after each reading.
  std::vector<Draw> read(std::vector<Reading> readings, const Sampling& sampling) {
    if (has_edges) read_all_but_last(readings);
    if (sampling.repetition_penalty != 1) return read_penalised(readings, sampling);
    return sampled(readings, sampling);
  }

  // Prepares a slot for a text that grows to at most `length` tokens. Reuses the longest cached prefix found in any slot
  // and returns its length; the caller reads the rest. The last token is never reused, because its logits are needed.
  // If too few pages are free, it takes those of idle slots; if these are too few, it returns nothing.
  std::optional<Index> start(Index slot, std::span<const std::int32_t> text, Index length,
                             std::span<const Index> idle) {
    Index best = slot, known = reusable(slot, text);
    for (Index other = 0; other < slots(); ++other) {
      if (reusable(other, text) > known) best = other, known = reusable(other, text);
    }
    PageTables::Table prefix = pages.of(best);
    prefix.resize(index(ceil_div(known, kPage)));
    if (has_edges) reuse_edges(slot, best, known);
    texts[index(slot)].assign(text.begin(), text.begin() + known);
    pages.share(slot, prefix);
    // The slot will write to the last page if only a part of it is reused.
    const auto copies = [&] { return known % kPage != 0 && pages.is_shared(prefix.back()) ? 1 : 0; };
    const auto missing = [&] {
      return ceil_div(length, kPage) - static_cast<Index>(prefix.size()) + copies() - pages.free();
    };
    for (const Index other : idle) {
      if (other != slot && missing() > 0) clear(other);
    }
    if (missing() > 0) return clear(slot), std::nullopt;
    if (copies()) {
      const std::int32_t before = pages.replace_last(slot);
      copy_page(pages.of(slot).back(), before);
    }
    pages.grow(slot, length);
    return known;
  }

  // A step as large as any of generate(), for the Plan device: a full chunk, if there are pages for it.
  void plan() {
    const Tokens tokens(index(room));
    std::vector<Reading> readings;
    Index rows = chunk, free = pages.free();
    for (Index slots_left = slots() - 1; slots_left >= 0; --slots_left) {  // each reads a token or more
      const Index length = std::min({room, std::max(rows - slots_left, Index{1}), (free - slots_left) * kPage});
      readings.push_back({slots() - 1 - slots_left, std::span(tokens).first(index(length))});
      rows -= length, free -= ceil_div(length, kPage);
    }
    sampled(readings, Sampling());
  }

 private:
  // The tokens of the texts are on the CPU, so it draws.
  std::vector<Draw> read_penalised(const std::vector<Reading>& readings, const Sampling& s) {
    const std::vector<A> logits = read(readings);
    std::vector<Draw> result(readings.size());
#pragma omp parallel for if (readings.size() > 1)
    for (std::size_t i = 0; i < readings.size(); ++i) {
      const Tokens& text = this->text(readings[i].slot);
      result[i] = draw(std::span(logits).subspan(i * index(c.vocab), index(c.vocab)), std::span(text), s,
                       Random(s.seed, readings[i].completion).uniform(text.size()));
    }
    return result;
  }

  // The rows that are read at once: for each its token, its position and its slot.
  struct Chunk {
    std::vector<SequencePiece> pieces;
    Tokens tokens, positions, slots;
    Tokens ends;  // the last rows of the readings that end in this chunk
    Index rows() const { return static_cast<Index>(tokens.size()); }
  };

  // Whether later calls do the same operations on the same memory.
  enum class Repeated { no, yes };

  std::vector<Draw> sampled(const std::vector<Reading>& readings, const Sampling& sampling) {
    std::vector<Draw> result(readings.size());
    const Matrix<Draw> of_readings = draws.columns(0, static_cast<Index>(readings.size()));
    if (std::exchange(sampling_before, sampling) != sampling) graphs.forget();
    compute(readings, Repeated::yes,
            [&](Matrix<A> logits, const DrawIndex& rows) { sample(dev, of_readings, logits, rows, sampling); });
    dev.download(result.data(), of_readings);
    return result;
  }

  // Appends tokens to slots and calls use(logits, index), with one row for each reading.
  template <class F>
  void compute(const std::vector<Reading>& readings, Repeated repeated, F&& use) {
    ++steps;
    auto scope = dev.scope();
    const Matrix<T> last = allocate<T>(dev, static_cast<Index>(readings.size()), c.hidden, Kind::chunk);
    Chunk next;
    Index done = 0;  // readings
    auto compute_next = [&](const Uploaded& rows) {
      const Index before = std::exchange(done, done + rows.ends.cols);
      compute_chunk(rows, last.slice({before, done}));
    };
    for (const Reading& r : readings) check(r.slot, r.tokens);
    for (const auto& [slot, tokens, completion] : readings) {
      for (std::size_t begin = 0; begin < tokens.size();) {
        if (next.rows() == chunk) compute_next(upload(std::exchange(next, {}), {}));
        const auto part = tokens.subspan(begin, std::min(tokens.size() - begin, index(chunk - next.rows())));
        begin += part.size();
        append(next, slot, part);
        if (begin == tokens.size()) next.ends.push_back(static_cast<std::int32_t>(next.rows() - 1));
      }
    }
    const Uploaded rows = upload(next, readings);
    const auto finish = [&] {
      compute_next(rows);
      const auto leased = weights.take_head();
      use(Head<Device, T>(dev, c, leased.weights).logits(last), rows.draws);
    };
    // Graphs hold addresses: they are valid while the arena below and the adapters stay.
    if (std::exchange(last_before, last.data) != last.data) graphs.forget();
    if (std::exchange(adapted_before, !c.adapters.empty()) != !c.adapters.empty()) graphs.forget();
    const bool one_token_each = done == 0 && next.rows() == static_cast<Index>(readings.size());
    if (repeated == Repeated::yes && one_token_each && weights.have_fixed_addresses() && !has_states) {
      graphs.run(dev, next.rows(), finish);
    } else {
      finish();
    }
  }

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

  // The prefix of the text whose summaries the slot still has. Those of convolutions exist for two lengths only.
  Index reusable(Index slot, std::span<const std::int32_t> text) const {
    const Index known = shared(slot, text), snapshot = snapshot_at[index(slot)];
    if (!has_edges || known == static_cast<Index>(texts[index(slot)].size())) return known;
    return snapshot >= 0 && known >= snapshot ? snapshot : 0;
  }

  void clear(Index slot) {
    pages.release(slot);
    texts[index(slot)].clear();
    snapshot_at[index(slot)] = -1;
  }

  // --- Convolutions and recurrences: what they need of each slot, and a snapshot of it before a prompt's last token ---

  // Calls copy(to, from) for the rows of two slots in each layer.
  void copy_edges(const std::vector<Summary<T>>& to, Index to_slot, const std::vector<Summary<T>>& from, Index slot) {
    for (std::size_t l = 0; l < to.size(); ++l)
      if (to[l].edge > 0)
        copy(dev, to[l].slice(piece(to_slot, kTile, kTile * slots())),
             from[l].slice(piece(slot, kTile, kTile * slots())));
  }
  // Prepares a slot to continue `from` after so many tokens.
  void reuse_edges(Index slot, Index from, Index known) {
    const bool at_end = known == static_cast<Index>(texts[index(from)].size());
    if (known > 0 && !at_end) {
      copy_edges(cache, slot, snapshots, from);
      if (slot != from) copy_edges(snapshots, slot, snapshots, from);
      snapshot_at[index(slot)] = known;
    } else {
      if (known > 0 && slot != from) copy_edges(cache, slot, cache, from);
      if (slot != from || known == 0) snapshot_at[index(slot)] = -1;
    }
  }
  // Reads prompts up to their last token, for which other completions of the prompt will begin.
  void read_all_but_last(std::vector<Reading>& readings) {
    std::vector<Reading> all_but_last;
    for (Reading& r : readings) {
      if (r.tokens.size() < 2) continue;
      all_but_last.push_back({r.slot, r.tokens.first(r.tokens.size() - 1), r.completion});
      r.tokens = r.tokens.last(1);
    }
    if (all_but_last.empty()) return;
    compute(all_but_last, Repeated::no, [](Matrix<A>, const DrawIndex&) {});
    for (const Reading& r : all_but_last) {
      copy_edges(snapshots, r.slot, cache, r.slot);
      snapshot_at[index(r.slot)] = static_cast<Index>(text(r.slot).size());
    }
  }

  // --- Pages ---

  void copy_page(Index to, Index from) {
    const auto copy = [&](Matrix<T> m) {
      dev.copy(m.slice(piece(to, kPage, m.rows)), m.slice(piece(from, kPage, m.rows)));
    };
    for (const Summary<T>& of_layer : cache)
      if (of_layer.edge == 0) copy(of_layer.k), copy(of_layer.v);
  }

  void append(Chunk& rows, Index slot, std::span<const std::int32_t> tokens) {
    Tokens& text = texts[index(slot)];
    const auto length = static_cast<Index>(text.size()), count = static_cast<Index>(tokens.size());
    pages.grow(slot, length + count);
    rows.pieces.push_back({slot, {length, length + count}, rows.rows()});
    rows.tokens.insert(rows.tokens.end(), tokens.begin(), tokens.end());
    for (Index i = 0; i < count; ++i) rows.positions.push_back(static_cast<std::int32_t>(length + i));
    rows.slots.resize(rows.tokens.size(), static_cast<std::int32_t>(slot));
    text.insert(text.end(), tokens.begin(), tokens.end());
  }

  // A chunk on the device.
  struct Uploaded {
    Matrix<const std::int32_t> tokens, ends;
    SequenceRows sequences;
    DrawIndex draws;
  };
  Uploaded upload(const Chunk& rows, const std::vector<Reading>& readings) {
    if (pages.changed()) upload_tables();
    Tokens all, completions, lengths;
    for (const Reading& r : readings) {
      completions.push_back(static_cast<std::int32_t>(r.completion));
      lengths.push_back(static_cast<std::int32_t>(text(r.slot).size()));
    }
    auto place = [&](const Tokens& numbers) {
      all.insert(all.end(), numbers.begin(), numbers.end());
      return table.columns(static_cast<Index>(all.size() - numbers.size()), static_cast<Index>(numbers.size()));
    };
    const SequenceIndex of_rows = {tables, place(rows.slots), place(rows.positions)};
    const SequenceRows sequences = {rows.pieces, of_rows, {key_begin, {}}};
    const Uploaded uploaded = {place(rows.tokens), place(rows.ends), sequences, {place(completions), place(lengths)}};
    dev.upload(table.columns(0, static_cast<Index>(all.size())), all.data());
    return uploaded;
  }

  void upload_tables() {
    PageTables::Table all(index(tables.size()));
    for (Index slot = 0; slot < slots(); ++slot) std::ranges::copy(pages.of(slot), all.begin() + slot * tables.cols);
    dev.upload(tables, all.data());
  }

  // ends: receives the hidden states of the last rows of readings.
  void compute_chunk(const Uploaded& chunk, Matrix<T> ends) {
    const Matrix<const std::int32_t> tokens = chunk.tokens, last = chunk.ends,
                                     positions = chunk.sequences.index.positions;
    const Index rows = tokens.cols;
    auto scope = dev.scope();
    const auto x = allocate<T>(dev, rows, c.hidden, Kind::chunk);
    embed(dev, c, x, {tokens, positions}, weights.take_embedding().weights.embedding);
    for (Index l = 0; l < c.layers; ++l) {
      const auto leased = weights.take_layer(l, l + 1 < c.layers ? l + 1 : kNoLayer);
      auto of_layer = dev.scope();
      TransformerLayer<Device, T> layer(dev, c, frequencies, l, leased.weights);
      const Activations<T> a = allocate_activations<T>(dev, c, l, Rows{0, rows});
      layer.decode(x, x, a, cache[index(l)], chunk.sequences);
    }
    embedding(dev, ends, {last, last, {}, {}}, EmbeddingTables<T>{x, {}}, 1);  // row i is row last[i] of x
  }

  Device& dev;
  const Config& c;
  const Index chunk;
  const Frequencies frequencies;
  Weights<Device, T> weights;
  decltype(std::declval<Device&>().scope()) scope;
  const Matrix<std::int32_t> table;      // of the chunk that is read
  const Matrix<std::int32_t> tables;     // of the pages of each slot
  const Matrix<std::int32_t> key_begin;  // zeros: every slot is one document
  const Matrix<Draw> draws;              // of the readings
  bool has_edges = false, has_states = false;
  std::vector<Summary<T>> cache, snapshots;  // of each layer
  PageTables pages;
  std::vector<Tokens> texts;
  std::vector<Index> snapshot_at;  // of each slot: how many tokens its snapshot is after; -1: none
  GraphCache<Device> graphs;       // of a token in each of so many sequences
  // What the graphs were recorded with.
  Sampling sampling_before;
  T* last_before = nullptr;
  bool adapted_before = false;
};

}  // namespace streambp
