// The operands of attention, and which row attends to which keys: row i to keys [first(i), i],
//
//   first(i) = max(key_begin[i], i - window + 1)         key_begin: the start of the document of row i
#pragma once

#include <cmath>
#include <span>

#include "kernels/base/matrix.cuh"

namespace streambp {

struct AttentionShape {
  Index heads, kv_heads, head_dim;
  Index window;            // 0: no window
  double score_scale = 0;  // 0: 1 / √head_dim
  double score_cap = 0;    // 0: none
  double scale() const { return score_scale > 0 ? score_scale : 1 / std::sqrt(static_cast<double>(head_dim)); }
  constexpr Index group() const { return heads / kv_heads; }  // query heads that share a key/value head
  constexpr Index q_width() const { return heads * head_dim; }
  constexpr Index kv_width() const { return kv_heads * head_dim; }
};

// The first token that each token of the stream may attend to. on_host: a copy in host memory, used to count FLOPs. If
// it is empty, as in generation, the stream counts as one document.
struct DocumentMask {
  Matrix<const std::int32_t> key_begin;
  std::span<const std::int32_t> on_host = {};
};

// Query rows of the stream and the keys they attend to.
struct AttentionSpan {
  DocumentMask mask;
  Rows rows;
  AttentionShape shape;
};

// In generation, the K and V of a sequence lie in pages of a cache, as in vLLM: those of tokens p kPage, p kPage + 1, ...
// are rows table[p] kPage, table[p] kPage + 1, ... Sequences share the pages of a common prefix. A page holds whole tiles
// of keys.
constexpr Index kPage = 128;

// The pages of one sequence. Without a table, token i is row i, as in training.
struct Pages {
  const std::int32_t* table = nullptr;

  // From a token of a page to its row.
  constexpr Index shift(Index token) const { return table ? (table[token / kPage] - token / kPage) * kPage : 0; }
};

// In bfloat16, a GPU cuts the keys of a document into segments of this many, counted from the tile of keys in which it begins,
// and adds up what they contribute, from first to last. So in generation several thread blocks can share a row, and its bits
// are still those of training. Layers with a window have one segment.
constexpr Index kSegment = 4096;

// The rows of a chunk are the next tokens of several sequences. tables: the pages of each sequence, a row for each. For
// each row of the chunk: its sequence, and its position in it.
struct SequenceIndex {
  Matrix<const std::int32_t> tables, sequences, positions;

  constexpr Pages pages_of(Index i) const { return {tables.row(sequences(0, i))}; }
  constexpr Index cache_row(Index i) const { return positions(0, i) + pages_of(i).shift(positions(0, i)); }
};

// The tokens that a chunk adds to a sequence: rows row, row + 1, ... of the chunk.
struct SequencePiece {
  Index sequence;
  Rows tokens;  // counted from its start
  Index row;
  Rows rows() const { return {row, row + tokens.size()}; }
};

// The same on the host and on the device. mask: zeros, because every sequence is one document.
struct SequenceRows {
  std::span<const SequencePiece> pieces;
  SequenceIndex index;
  DocumentMask mask;
};

// q: a row for each of span.rows, of width heads * head_dim. k, v: a row for each token of the stream, of width
// kv_heads * head_dim; in generation, those of a cache.
template <class T>
struct AttentionInput {
  Matrix<const T> q, k, v;
  Pages pages = {};
};

// K and V, or their gradients.
template <class T>
struct KeysValues {
  Matrix<T> k, v;
  KeysValues slice(Rows rows) const { return {k.slice(rows), v.slice(rows)}; }
};

// attended: same shape as q. lse: log Σ exp(score), of width heads. sums: memory for those of segments.
template <class T>
struct AttentionOutput {
  Matrix<T> attended;
  Matrix<Accumulator<T>> lse, sums = {};
};

// dq_sums: dq, or on the CPU float32 memory for a dq in bfloat16, because tiles of keys add to it one after the other.
template <class T>
struct AttentionGradient {
  Matrix<T> dq;
  Matrix<Accumulator<T>> dk, dv, dq_sums = {};
};

// What the backward pass reads in addition to the forward input. delta: rowsum(dout * attended) of each head.
template <class T>
struct AttentionUpstream {
  Matrix<const T> dout;
  Matrix<const Accumulator<T>> lse, delta;
};

// The keys that a row attends to.
constexpr Rows keys_of(Index row, Matrix<const std::int32_t> key_begin, Index window) {
  const Index begin = key_begin(0, row);
  return {window > 0 ? most(begin, row - window + 1) : begin, row + 1};
}

// The number of query-key pairs in the span. Attention FLOPs are proportional to it.
inline double attention_pairs(const AttentionSpan& span) {
  const Index window = span.shape.window;
  const auto on_host = span.mask.on_host;
  if (!on_host.empty()) {
    const Matrix<const std::int32_t> key_begin(on_host.data(), 1, static_cast<Index>(on_host.size()));
    double pairs = 0;
    for (Index i = span.rows.begin; i < span.rows.end; ++i) {
      pairs += static_cast<double>(keys_of(i, key_begin, window).size());
    }
    return pairs;
  }
  auto pairs_before = [&](Index n) {  // of rows 0 .. n-1
    const double w = static_cast<double>(window > 0 ? std::min(window, n) : n);
    return w * (w + 1) / 2 + (static_cast<double>(n) - w) * w;
  };
  return pairs_before(span.rows.end) - pairs_before(span.rows.begin);
}

}  // namespace streambp
