// Who attends to whom: row i to the keys [first(i), i],
//
//   first(i) = max(key_begin[i], i - window + 1)         key_begin: the start of the document of row i
#pragma once

#include <cmath>
#include <span>

#include "kernels/base/matrix.cuh"

namespace streambp {

struct AttentionShape {
  Index heads, kv_heads, head_dim, window;
  double score_scale = 0;  // 0: 1 / √head_dim
  double scale() const { return score_scale > 0 ? score_scale : 1 / std::sqrt(static_cast<double>(head_dim)); }
};

// The first token that each token of the stream may attend to: on the device and, to count work, on the host. Without
// the latter, as on Plan, the stream counts as one document.
struct DocumentMask {
  Matrix<const std::int32_t> key_begin;
  std::span<const std::int32_t> on_host = {};
};

// Which rows attend, and to which keys.
struct AttentionSpan {
  DocumentMask mask;
  Rows rows;
  AttentionShape shape;
};

// The keys that a row attends to.
constexpr Rows keys_of(Index row, Matrix<const std::int32_t> key_begin, Index window) {
  const Index begin = key_begin(0, row);
  return {window > 0 ? most(begin, row - window + 1) : begin, row + 1};
}

// Query-key pairs of these rows: the work of attention. Without the documents' beginnings, as on Plan, the stream counts
// as one document.
inline double attention_pairs(const AttentionSpan& span) {
  const Rows rows = span.rows;
  const Index window = span.shape.window;
  if (!span.mask.on_host.empty()) {
    const auto key_begin = span.mask.on_host;
    const Matrix<const std::int32_t> begins(key_begin.data(), 1, static_cast<Index>(key_begin.size()));
    double pairs = 0;
    for (Index i = rows.begin; i < rows.end; ++i) pairs += static_cast<double>(keys_of(i, begins, window).size());
    return pairs;
  }
  auto pairs_before = [&](Index n) {  // of rows 0 .. n-1
    const double w = static_cast<double>(window > 0 ? std::min(window, n) : n);
    return w * (w + 1) / 2 + (static_cast<double>(n) - w) * w;
  };
  return pairs_before(rows.end) - pairs_before(rows.begin);
}

}  // namespace streambp
