// The token stream: documents laid end to end, on the host and on a device.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "model/parameters.cuh"

namespace streambp {

// A batch of documents laid end to end: one token stream. There is no batch dimension.
struct Batch {
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> targets;    // the token to predict after each token, or -1 for none
  std::vector<std::int32_t> positions;  // of each token in its document
  std::vector<std::int32_t> key_begin;  // the first token that each token may attend to: its document's first
  // What an objective may need besides, of each token; empty: not known.
  std::vector<double> reference = {};   // log-probability of its target under the model that training started from
  std::vector<double> old = {};         // the same under the model that sampled it
  std::vector<double> advantages = {};  // of its document

  Index size() const { return static_cast<Index>(tokens.size()); }
  Index target_count() const {
    return static_cast<Index>(targets.size()) - std::count(targets.begin(), targets.end(), -1);
  }
  Index target_count(Rows rows) const {
    return rows.size() - std::count(targets.begin() + rows.begin, targets.begin() + rows.end, -1);
  }
  std::vector<Rows> documents() const {
    std::vector<Rows> result;
    for (Index i = 0; i < size(); ++i) {
      if (i == 0 || key_begin[static_cast<std::size_t>(i)] == i) result.push_back({i, i});
      result.back().end = i + 1;
    }
    return result;
  }
  // Of the document of each token.
  std::vector<std::int32_t> document_lengths() const {
    std::vector<std::int32_t> lengths(tokens.size());
    for (std::size_t end = tokens.size(), i = end; i-- > 0;) {
      lengths[i] = static_cast<std::int32_t>(end) - key_begin[i];
      if (static_cast<std::size_t>(key_begin[i]) == i) end = i;
    }
    return lengths;
  }
  // Appends these rows of a document, as a document. The target of each is the next token of the document, if there is
  // one and `learned` marks it (empty: marks all). This is the one place where tokens are shifted to targets.
  void append(std::span<const std::int32_t> document, Rows rows, std::span<const std::uint8_t> learned = {}) {
    const auto begin = static_cast<std::int32_t>(tokens.size());
    for (auto i = static_cast<std::size_t>(rows.begin); i < static_cast<std::size_t>(rows.end); ++i) {
      const bool has_target = i + 1 < document.size() && (learned.empty() || learned[i + 1]);
      tokens.push_back(document[i]);
      targets.push_back(has_target ? document[i + 1] : -1);
      positions.push_back(static_cast<std::int32_t>(i) - static_cast<std::int32_t>(rows.begin));
      key_begin.push_back(begin);
    }
  }
  // Appends a document, whose last token may have a target, too.
  void append(std::vector<std::int32_t> document, std::int32_t last_target = -1) {
    const Rows rows = {0, static_cast<Index>(document.size())};
    if (last_target >= 0) document.push_back(last_target);
    append(document, rows);
  }
};

// Refuses a batch whose parts are not of one length.
inline void require_shape(const Batch& batch) {
  const std::size_t n = batch.tokens.size();
  require(batch.targets.size() == n && batch.positions.size() == n && batch.key_begin.size() == n, "a batch has ", n,
          " tokens, but ", batch.targets.size(), " targets, ", batch.positions.size(), " positions and ",
          batch.key_begin.size(), " key_begins");
  for (const auto& [what, numbers] : {std::pair{"reference log-probabilities", &batch.reference},
                                      {"old log-probabilities", &batch.old},
                                      {"advantages", &batch.advantages}}) {
    require(numbers->empty() || numbers->size() == n, "a batch has ", n, " tokens, but ", numbers->size(), " ", what);
    for (double x : *numbers) require(std::isfinite(x), "one of the ", what, " of a batch is ", x);
  }
}

// Refuses a batch that the model cannot read.
inline void validate(const Config& c, const Batch& batch) {
  require_shape(batch);
  const std::size_t n = batch.tokens.size();
  for (std::size_t i = 0; i < n; ++i) {
    const std::int32_t begin = batch.key_begin[i], before = i > 0 ? batch.key_begin[i - 1] : 0;
    require(before <= begin && begin <= static_cast<Index>(i), "key_begin ", begin, " of token ", i,
            " is not between that of the token before, ", before, ", and the token itself");
    require(batch.positions[i] >= 0, "position ", batch.positions[i], " of token ", i, " is negative");
    require(0 <= batch.tokens[i] && batch.tokens[i] < c.vocab, "token ", batch.tokens[i], " at position ", i,
            " is outside the model's vocabulary of ", c.vocab);
    require(-1 <= batch.targets[i] && batch.targets[i] < c.vocab, "target ", batch.targets[i], " at position ", i,
            " is outside the model's vocabulary of ", c.vocab);
    require(c.positions == Positions::rope || batch.positions[i] < c.max_length, "a document is longer than the ",
            c.max_length, " positions that the model has learned");
  }
}

// A batch on the device, each 1 x N; and, on the host, where the document of each token begins.
struct Stream {
  Matrix<std::int32_t> tokens, targets, positions, key_begin;
  Matrix<std::int32_t> rows_by_token, rows_by_position;
  std::vector<std::int32_t> document_begin = {};
  Index size() const { return tokens.cols; }
};

template <class Device>
Stream allocate_stream(Device& dev, Index rows) {
  auto numbers = [&] { return dev.template allocate<std::int32_t>(1, rows, Kind::stream); };
  return {numbers(), numbers(), numbers(), numbers(), numbers(), numbers()};
}

}  // namespace streambp
