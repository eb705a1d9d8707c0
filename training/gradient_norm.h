// The norm of a gradient, for clipping, and a fingerprint by which runs can be compared step by step.
#pragma once

#include <bit>

#include "kernels/base/random.h"
#include "training/optimizer.h"

namespace streambp {

// Sums of squares of the rows of a gradient in far memory.
template <class Device, class G>
void far_row_squares(Device& dev, Matrix<double> sums, FarMatrix<G> far) {
  for (Index begin = 0; begin < far.rows; begin += kFarRows) {
    auto scope = dev.scope();
    const Rows part = {begin, least(begin + kFarRows, far.rows)};
    const auto near = allocate<G>(dev, part.size(), far.cols, Kind::gradients);
    dev.get(near, far.slice(part)).wait();
    row_squares(dev, sums.columns(part.begin, part.size()), near);
  }
}

struct GradientNorm {
  double norm = 0;
  std::uint64_t fingerprint = 0;  // a hash of the squared norms of all rows
  std::string not_finite;         // the tensor where backward first met a number that is not
};

// sqrt(Σ g²) over all trained parameters, row by row: the order does not depend on the shards. All ranks get it.
template <class Device, class G>
GradientNorm global_norm(Device& dev, const Config& c, Tensors<G>& gradient, const Group& ranks) {
  const auto entries = trained(table(c, gradient));
  Index rows = 0;
  const auto rows_of = [](const Entry<G>& e) { return e.with_matrix([](auto m) { return m.rows; }); };
  for (const Entry<G>& e : entries) rows += rows_of(e);
  auto scope = dev.scope();
  const auto sums = allocate<double>(dev, 1, rows, Kind::sums);
  Index first = 0;
  std::vector<RowSquares<G>> near;
  for (const Entry<G>& e : entries) {
    const auto of_rows = sums.columns(first, rows_of(e));
    if (e.is_far()) {
      far_row_squares(dev, of_rows, *e.far);
    } else if (e.wide) {
      row_squares(dev, of_rows, *e.wide);
    } else {
      near.push_back({of_rows, *e.matrix});
    }
    first += rows_of(e);
  }
  row_squares(dev, near);
  if constexpr (!Device::computes) return {};
  const auto of_ranks = gather_on_host(ranks, to_host(dev, sums));
  std::vector<std::size_t> next(of_ranks.size());
  double sum = 0;
  GradientNorm result;
  for (const Entry<G>& e : entries) {
    for (Index rank = 0; rank < ranks.size; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      for (Index i = 0; i < shard(e.parameter.rows, ranks, rank).size(); ++i) {
        const double squares = of_ranks[r][next[r]++];
        sum += squares, result.fingerprint = mix(result.fingerprint ^ std::bit_cast<std::uint64_t>(squares));
        if (!std::isfinite(squares)) result.not_finite = e.parameter.name;
      }
    }
  }
  result.norm = std::sqrt(sum);
  return result;
}

}  // namespace streambp
