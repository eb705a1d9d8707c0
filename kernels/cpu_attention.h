// Attention on the CPU, by tiles of queries and tiles of keys, with the products of gemm.h.
//
// A tile of queries holds every query once for each head of its group: the heads of a group share their keys and
// values, so one product serves all of them. Row i of head g is row i * group + g of the tile. Its scores are a row of
// the product with a tile of keys, and stay in the cache.
//
// All queries and keys of a tile belong to one document, and tiles of keys count from its first token. So the results
// of a query depend neither on other queries nor on where its document lies in the stream. The backward pass is in
// cpu_attention_backward.h.
#pragma once

#include <omp.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "kernels/attention_shape.h"
#include "kernels/base/inner_loops.h"
#include "kernels/base/math.cuh"
#include "kernels/base/row_sums.h"
#include "kernels/elementwise.cuh"

namespace streambp::cpu {

constexpr Index kKeys = 128;  // keys of a tile
constexpr Index kParts = 2;   // of kBlock numbers, in the widest head
inline Index parts_of(Index dim) { return ceil_div(dim, kBlock); }
static_assert(kTile % kKeys == 0 && kPage % kKeys == 0);

// Queries of a tile, a power of two, so that tiles divide chunks.
inline Index queries_of_tile(const AttentionShape& shape) {
  require(shape.head_dim <= kParts * kBlock && shape.group() <= kBlock, "attention: groups of ", shape.group(),
          " heads of ", shape.head_dim, " are too large");
  return static_cast<Index>(std::bit_floor(static_cast<std::uint64_t>(kBlock / shape.group())));
}

// Queries of one document, as rows of the stream. document: its first token.
struct QueryTile {
  Rows rows;
  Index document;
};

// size: the most queries of a tile. Tiles end at multiples of it.
inline std::vector<QueryTile> query_tiles(const AttentionSpan& span, Index size) {
  std::vector<QueryTile> tiles;
  for (Index row = span.rows.begin; row < span.rows.end; ++row) {
    const Index document = span.mask.key_begin(0, row);
    if (tiles.empty() || tiles.back().document != document || row % size == 0) tiles.push_back({{row, row}, document});
    tiles.back().rows.end = row + 1;
  }
  return tiles;
}

// The first tile of keys that a query attends to, counted from the start of its document.
inline Index first_tile_of_keys(Index query, const AttentionSpan& span) {
  const Index document = span.mask.key_begin(0, query);
  return (keys_of(query, span.mask.key_begin, span.shape.window).begin - document) / kKeys;
}

// The keys of a tile before `end`, as rows of the stream.
inline Rows keys_of_tile(Index tile, Index document, Index end) {
  const Rows keys = piece(tile, kKeys, end - document);
  return {document + keys.begin, document + keys.end};
}

// The queries that attend to a key of `keys`. They are contiguous, because the first key of a row never decreases from
// row to row of a document.
inline Rows queries_of(Rows queries, Rows keys, const AttentionSpan& span) {
  Index begin = most(queries.begin, keys.begin), end = most(queries.end, begin);
  while (end > begin && keys_of(end - 1, span.mask.key_begin, span.shape.window).begin >= keys.end) --end;
  return {begin, end};
}

// The columns of a tile of keys that a query attends to. May be empty.
inline Rows visible(Index query, Rows keys, const AttentionSpan& span) {
  const Rows all = keys_of(query, span.mask.key_begin, span.shape.window);
  const Index begin = std::clamp(all.begin - keys.begin, Index{0}, keys.size());
  return {begin, std::clamp(all.end - keys.begin, begin, keys.size())};
}

// Whether all queries attend to all of the keys. If the first and the last one do, so do those between them.
inline bool all_visible(Rows queries, Rows keys, const AttentionSpan& span) {
  return queries.size() == 0 || (visible(queries.begin, keys, span).size() == keys.size() &&
                                 visible(queries.end - 1, keys, span).size() == keys.size());
}

// A matrix of type M that can be the left operand of a product in T. If T is narrower, operand() takes the numbers of a
// copy, rounded(), which the softmax writes row by row while they are in the L1 cache.
template <class M, class T>
class OperandMatrix {
 public:
  Matrix<M> matrix(Index rows, Index cols) const {
    if constexpr (kIsOperand) {
      return block_.matrix(rows, cols);
    } else {
      require(rows <= kBlock && cols <= kBlock, "attention: a tile of ", rows, "x", cols, " is too large");
      return {memory_.data(), rows, cols};
    }
  }

  // of some of its rows
  Matrix<T> rounded(Matrix<M> m) const {
    if constexpr (std::is_same_v<M, T>)
      return m;
    else
      return {rounded_.data() + (m.data - memory_.data()), m.rows, m.cols, m.stride};
  }
  Left<T> operand(Matrix<M> m, Op op) const {
    if constexpr (kIsOperand)
      return as_left(m, op);
    else
      return block_.copy(rounded(m), op);
  }

 private:
  static constexpr bool kIsOperand = std::is_same_v<M, T> && std::is_same_v<T, Accumulator<T>>;
  LeftBlock<T> block_;
  Buffer<M> memory_{kIsOperand ? 0 : kBlock * kBlock};
  Buffer<T> rounded_{std::is_same_v<M, T> ? 0 : kBlock * kBlock};
};

// S = of_scores (of_queries Q) Kᵀ. A bfloat16 is not scaled, because that would round it once more.
template <class T>
struct ScoreScale {
  using A = Accumulator<T>;
  A of_queries, of_scores;

  ScoreScale(const AttentionShape& shape)
      : of_queries(std::is_same_v<T, A> ? static_cast<A>(shape.scale()) : A(1)),
        of_scores(std::is_same_v<T, A> ? A(1) : static_cast<A>(shape.scale())) {}
};

// The rows of one group of heads, as the rows of a tile: q has `group` heads side by side. part: of each head's numbers.
template <class T>
Matrix<T> stack(const OperandMatrix<T, T>& memory, Matrix<const T> q, Index dim, Rows part, Accumulator<T> factor = 1) {
  const Index group = q.cols / dim;
  const Matrix<T> all = memory.matrix(q.rows * group, part.size());
  for (Index i = 0; i < q.rows; ++i) {
    for (Index g = 0; g < group; ++g) {
      const T* from = q.row(i) + g * dim + part.begin;
      T* to = all.row(i * group + g);
      if (factor == 1) {
        std::copy_n(from, part.size(), to);
      } else {
        for (Index d = 0; d < part.size(); ++d) to[d] = from[d] * factor;
      }
    }
  }
  return all;
}

// A probability of 0 times a value that is NaN or infinite is NaN. So where some rows do not see all keys of a tile, its
// rows of K or V that are not finite become 0 in the product. Returns these rows, and replaces `m` by a copy without them.
template <class T>
std::vector<Index> take_out_not_finite(Matrix<const T>& m, std::vector<T>& copy) {
  std::vector<Index> rows;
  for (Index i = 0; i < m.rows; ++i) {
    const T* row = m.row(i);
    if (sum_of(m.cols, [=](Index j) { return Accumulator<T>(0) * row[j]; }) != 0) rows.push_back(i);
  }
  if (rows.empty()) return rows;
  copy.resize(m.size());
  const Matrix<T> finite(copy.data(), m.rows, m.cols);
  for (Index i = 0; i < m.rows; ++i) std::copy_n(m.row(i), m.cols, finite.row(i));
  for (const Index i : rows) std::fill_n(finite.row(i), m.cols, T(0));
  m = finite;
  return rows;
}

// Queries of a tile, so few that every thread gets work. Results do not depend on it.
inline Index queries_of_tile_for_threads(Index queries, const AttentionShape& shape) {
  constexpr Index few = 16;
  Index size = queries_of_tile(shape);
  while (size > few && queries * shape.kv_heads < 2 * omp_get_max_threads() * size) size /= 2;
  return size;
}

template <class T>
class AttentionTile {
 public:
  using A = Accumulator<T>;

  // in.q and out: the rows of the tile and the columns of a group. in.k, in.v: all rows of the group's key/value head. The
  // keys of a tile follow each other in one page.
  void compute(const AttentionOutput<T>& out, const AttentionInput<T>& in, const QueryTile& tile,
               const AttentionSpan& span) {
    const auto& [queries, document] = tile;
    const Index dim = span.shape.head_dim, group = in.q.cols / dim;
    const ScoreScale<T> scale(span.shape);
    const Index stacked_rows = in.q.rows * group;
    const bool few = stacked_rows <= kFewRows;  // as in decoding: packing K and V would take longer than the products
    Matrix<T> stacked[kParts];
    Left<T> q[kParts];
    for (Index p = 0; p < parts_of(dim); ++p) {
      stacked[p] = stack(queries_[p], in.q, dim, piece(p, kBlock, dim), scale.of_queries);
      if (!few) q[p] = queries_[p].operand(stacked[p], Op::as_is);
    }
    const Matrix<A> o(output_.data(), stacked_rows, dim);
    std::fill_n(o.data, o.size(), A(0));
    std::fill_n(running_, stacked_rows, RunningSoftmax<A>{});
    for (Index t = first_tile_of_keys(queries.begin, span); document + t * kKeys < queries.end; ++t) {
      const Rows keys = keys_of_tile(t, document, queries.end), seeing = queries_of(queries, keys, span),
                 rows = {(seeing.begin - queries.begin) * group, (seeing.end - queries.begin) * group};
      const Index shift = in.pages.shift(keys.begin);
      const Rows of_cache = {keys.begin + shift, keys.end + shift};
      const Matrix<A> s = scores_.matrix(stacked_rows, keys.size()).slice(rows);
      for (Index i = 0; few && i < s.rows; ++i) std::fill_n(s.row(i), s.cols, A(0));
      for (Index p = 0; p < parts_of(dim); ++p) {
        const Matrix<const T> k = in.k.slice(of_cache).columns(piece(p, kBlock, dim));
        if (few) {
          multiply_few_rows<T>(s, stacked[p].slice(rows), k, Op::transposed);
        } else {
          keys_.pack(k, Op::transposed);
          multiply(s, q[p].slice(rows), keys_, p == 0 ? Update::assign : Update::add);
        }
      }
      for (Index i = 0; i < s.rows; ++i) {
        const Index row = rows.begin + i;
        const Rows seen = visible(queries.begin + row / group, keys, span);
        inner_loops<T>().softmax_row({s.row(i), s.cols, seen, scale.of_scores, static_cast<A>(span.shape.score_cap)},
                                     running_[row], o.row(row), dim, scores_.rounded(s).row(i));
      }
      Matrix<const T> v = in.v.slice(of_cache);
      std::vector<Index> not_finite;
      if (!all_visible(seeing, keys, span)) not_finite = take_out_not_finite(v, finite_);
      if (few) {
        multiply_few_rows<T>(o.slice(rows), scores_.rounded(s), v, Op::as_is);
      } else {
        const Left<T> probabilities = scores_.operand(s, Op::as_is);
        for (Index p = 0; p < parts_of(dim); ++p) {
          const Rows part = piece(p, kBlock, dim);
          values_.pack(v.columns(part), Op::as_is);
          multiply(o.slice(rows).columns(part), probabilities, values_, Update::add);
        }
      }
      for (const Index key : not_finite) {
        for (Index i = 0; i < s.rows; ++i) {
          const Rows seen = visible(queries.begin + (rows.begin + i) / group, keys, span);
          for (Index d = 0; d < dim && seen.begin <= key && key < seen.end; ++d)
            o(rows.begin + i, d) += s(i, key) * static_cast<A>(in.v(of_cache.begin + key, d));
        }
      }
    }
    for (Index row = 0; row < o.rows; ++row) {
      T* to = out.attended.row(row / group) + row % group * dim;
      for (Index d = 0; d < dim; ++d) to[d] = o(row, d) / running_[row].sum;
      out.lse(row / group, row % group) = running_[row].maximum + logarithm(running_[row].sum);
    }
  }

 private:
  OperandMatrix<T, T> queries_[kParts];
  OperandMatrix<A, T> scores_;
  RightPanels<T> keys_{kKeys}, values_{kBlock};
  Buffer<A> output_{kBlock * kParts * kBlock};
  RunningSoftmax<A> running_[kBlock];
  std::vector<T> finite_;
};

// A tile of the span's queries, for one group of heads.
template <class T>
void attend(const AttentionOutput<T>& out, const AttentionInput<T>& in, const QueryTile& tile, Index kv_head,
            const AttentionSpan& span) {
  thread_local AttentionTile<T> memory;
  const Rows rows = tile.rows.relative_to(span.rows);
  auto heads = [&](auto m) { return m.slice(rows).columns(piece(kv_head, m.cols / span.shape.kv_heads, m.cols)); };
  auto keys = [&](auto m) { return m.columns(kv_head * span.shape.head_dim, span.shape.head_dim); };
  memory.compute({heads(out.attended), heads(out.lse)}, {heads(in.q), keys(in.k), keys(in.v), in.pages}, tile, span);
}

}  // namespace streambp::cpu

namespace streambp {

template <class T>
void compute_attention(Cpu&, const AttentionOutput<T>& out, const AttentionInput<T>& in, const AttentionSpan& span) {
  const auto tiles = cpu::query_tiles(span, cpu::queries_of_tile_for_threads(span.rows.size(), span.shape));
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (std::size_t t = tiles.size(); t > 0; --t) {  // the last tiles of a document take longest
    for (Index kv_head = 0; kv_head < span.shape.kv_heads; ++kv_head) cpu::attend(out, in, tiles[t - 1], kv_head, span);
  }
}

}  // namespace streambp
