// The token stream: documents laid end to end, on the host and on a device.
#pragma once

#include <algorithm>
#include <numeric>
#include <span>
#include <vector>

#include "kernels/attention_shape.h"
#include "kernels/base/device.cuh"
#include "kernels/embedding.cuh"
#include "model/config.h"
#include "parallel/division.h"

namespace streambp {

using Tokens = std::vector<std::int32_t>;

// Documents laid end to end on the host form one token stream. There is no batch dimension.
struct TokenBatch {
  Tokens tokens;
  std::vector<std::int32_t> targets;    // the token to predict after each token, or -1 for none
  std::vector<std::int32_t> positions;  // of each token in its document
  std::vector<std::int32_t> key_begin;  // the first token that each token may attend to: its document's first

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
  // For each token, the length of its document.
  std::vector<std::int32_t> document_lengths() const {
    std::vector<std::int32_t> lengths(tokens.size());
    for (std::size_t end = tokens.size(), i = end; i-- > 0;) {
      lengths[i] = static_cast<std::int32_t>(end) - key_begin[i];
      if (static_cast<std::size_t>(key_begin[i]) == i) end = i;
    }
    return lengths;
  }
  // Appends these rows of a document as a separate document. The target of a row is the next token, if `learned` marks
  // that token (empty: all are marked). This is the only place that shifts tokens to targets.
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
  // The length of the longest document.
  Index longest() const { return positions.empty() ? 0 : *std::max_element(positions.begin(), positions.end()) + 1; }
  // Appends a document. Its last token may have a target too.
  void append(std::vector<std::int32_t> document, std::int32_t last_target = -1) {
    const Rows rows = {0, static_cast<Index>(document.size())};
    if (last_target >= 0) document.push_back(last_target);
    append(document, rows);
  }
};

// Refuses a batch with fields of different lengths.
inline void require_shape(const TokenBatch& batch) {
  const std::size_t n = batch.tokens.size();
  require(batch.targets.size() == n && batch.positions.size() == n && batch.key_begin.size() == n, "a batch has ", n,
          " tokens, but ", batch.targets.size(), " targets, ", batch.positions.size(), " positions and ",
          batch.key_begin.size(), " key_begins");
}

// Refuses a batch that the model cannot read.
inline void validate(const Config& c, const TokenBatch& batch) {
  require_shape(batch);
  const std::size_t n = batch.tokens.size();
  for (std::size_t i = 0; i < n; ++i) {
    const std::int32_t begin = batch.key_begin[i], before = i > 0 ? batch.key_begin[i - 1] : 0;
    require(begin == before || begin == static_cast<Index>(i), "key_begin ", begin, " of token ", i,
            " is neither that of the token before, ", before, ", nor the token itself");
    require(batch.positions[i] >= 0, "position ", batch.positions[i], " of token ", i, " is negative");
    require(0 <= batch.tokens[i] && batch.tokens[i] < c.vocab, "token ", batch.tokens[i], " at position ", i,
            " is outside the model's vocabulary of ", c.vocab);
    require(-1 <= batch.targets[i] && batch.targets[i] < c.vocab, "target ", batch.targets[i], " at position ", i,
            " is outside the model's vocabulary of ", c.vocab);
    require(c.positions == Positions::rope || batch.positions[i] < c.max_length, "a document is longer than the ",
            c.max_length, " positions that the model has learned");
    require(c.rope_scaling.covers(batch.positions[i] + 1), "a document has more than the ", c.rope_scaling.longest,
            " tokens that RoPE is scaled for");
  }
}

// What attention needs to know of some rows of the stream.
struct StreamRows {
  Rows rows;
  Matrix<const std::int32_t> positions;  // of this rank's share of these rows
  DocumentMask mask;                     // of the whole stream
};

// A batch on the device: a number for each of this rank's rows, and key_begin for all rows of the stream.
struct Stream {
  Division division;
  Matrix<std::int32_t> tokens, targets, positions, key_begin;
  Matrix<std::int32_t> rows_by_token, rows_by_position;  // lane by lane
  std::vector<std::int32_t> key_begin_on_host = {};
  Index longest = 0;  // rows of the longest stream that another rank may have

  Index size() const { return tokens.cols; }
  EmbeddingIndex embedding_index() const {
    return {tokens, positions, rows_by_token, rows_by_position, division.lanes};
  }
  // Of some rows, for forward.
  EmbeddingIndex embedding_index(Rows own) const { return {tokens.columns(own), positions.columns(own), {}, {}, 1}; }
};

// The rows of a stream, lane by lane, sorted by index (token or position). Rows with equal index go from last to first.
inline std::vector<std::int32_t> rows_by_index(const std::vector<std::int32_t>& indices,
                                               const Division& division = {}) {
  std::vector<std::int32_t> rows(indices.size());
  std::iota(rows.rbegin(), rows.rend(), 0);
  auto key = [&](std::int32_t row) { return std::pair(division.lane(row), indices[static_cast<std::size_t>(row)]); };
  std::stable_sort(rows.begin(), rows.end(), [&](std::int32_t a, std::int32_t b) { return key(a) < key(b); });
  return rows;
}

template <class Device>
Stream allocate_stream(Device& dev, const Division& division) {
  auto numbers = [&](Index rows) { return allocate<std::int32_t>(dev, 1, rows, Kind::stream); };
  const Index own = division.own();
  return {division, numbers(own), numbers(own), numbers(own), numbers(division.rows), numbers(own), numbers(own)};
}

}  // namespace streambp
