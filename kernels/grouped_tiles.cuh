// The products of kernels/grouped_matmul.cuh in bfloat16 on tensor cores. A thread block computes a tile of a result. How
// many rows a group has is known on the GPU only, so the grid has blocks for the worst case; those without rows end at once.
//
// A row's sums do not depend on other rows. The weight gradient adds the rows of a tile of the stream at a time.
#pragma once

#include "kernels/base/tiles.cuh"
#include "kernels/routes.cuh"

namespace streambp::cuda {

constexpr int kGroupedTile = 128;  // rows and columns of a tile of the result: 64 x 64 for each warp
constexpr int kGroupedInner = 32;  // terms of the sums at once
constexpr int kGroupedStages = 4;  // of these on their way to shared memory
static_assert(kTileWarps == 4);

using GroupedSums = Numbers<4, 8>;

// Some rows of an operand that is stored as it is or transposed.
template <bool TRANSPOSED>
struct GroupedOperand {
  using Tile = SharedTile<TRANSPOSED ? kGroupedInner : kGroupedTile, TRANSPOSED ? kGroupedTile : kGroupedInner>;
  Matrix<const BFloat16> m;

  // Rows of the operand from `first` on.
  __device__ GroupedOperand from(Index first) const {
    if (TRANSPOSED) return {{m.data + first, m.rows, m.cols - first, m.stride}};
    return {{m.row(first), m.rows - first, m.cols, m.stride}};
  }
  __device__ int inner() const { return static_cast<int>(TRANSPOSED ? m.rows : m.cols); }
  __device__ void load_step(Tile tile, int step, bool aligned) const {
    const int done = step * kGroupedInner, rows = static_cast<int>(m.rows);
    TRANSPOSED ? load(tile, m, done, rows, aligned)
               : load(tile, {m.data + done, m.rows, m.cols - done, m.stride}, 0, rows, aligned);
  }
};

// The first row and column of a warp's results in a tile.
__device__ inline int grouped_row() { return static_cast<int>(threadIdx.x) / kWarp / 2 * 64; }
__device__ inline int grouped_column() { return static_cast<int>(threadIdx.x) / kWarp % 2 * 64; }

// The tile of a bᵀ that begins at the first rows of a and b.
template <bool A_TRANSPOSED, bool B_TRANSPOSED>
__device__ GroupedSums grouped_product(const GroupedOperand<A_TRANSPOSED>& a, const GroupedOperand<B_TRANSPOSED>& b,
                                       bool aligned) {
  using A = typename GroupedOperand<A_TRANSPOSED>::Tile;
  using B = typename GroupedOperand<B_TRANSPOSED>::Tile;
  BFloat16* memory = shared_memory<BFloat16>();
  const auto tile_of_a = [&](int step) { return A{memory + step % kGroupedStages * (A::kSize + B::kSize)}; };
  const auto tile_of_b = [&](int step) { return B{tile_of_a(step).data + A::kSize}; };
  const int steps = (a.inner() + kGroupedInner - 1) / kGroupedInner;
  const auto fetch = [&](int step) {
    if (step >= steps) return ptx::cp_async_commit(), ptx::cp_async_commit();
    a.load_step(tile_of_a(step), step, aligned), b.load_step(tile_of_b(step), step, aligned);
  };
  GroupedSums sums;
  sums.fill(0);
  __syncthreads();  // all warps are done with an earlier product
  for (int step = 0; step < kGroupedStages - 1; ++step) fetch(step);
  for (int step = 0; step < steps; ++step) {
    ptx::cp_async_wait<2 * (kGroupedStages - 2)>();
    __syncthreads();  // this step's tiles have arrived; all warps are done with those of the last step
    fetch(step + kGroupedStages - 1);
    multiply_shared<A_TRANSPOSED, B_TRANSPOSED>(sums, tile_of_a(step), grouped_row(), tile_of_b(step),
                                                grouped_column());
  }
  ptx::cp_async_wait<0>();
  return sums;
}

// Some rows of one group, for a thread block.
struct GroupedRows {
  Index group, begin, end;

  // A group of n rows has more than n / kGroupedTile numbers, and all groups together grouped_row_tiles().
  __device__ GroupedRows(const Routes& routes, Index number) {
    const auto first = [&](Index e) { return routes.begin(0, e) / kGroupedTile + e; };
    group = 0;
    for (Index high = routes.experts() - 1; group < high;) {
      const Index middle = (group + high + 1) / 2;
      first(middle) <= number ? group = middle : high = middle - 1;
    }
    begin = routes.begin(0, group) + (number - first(group)) * kGroupedTile;
    end = least(begin + kGroupedTile, routes.begin(0, group + 1));
  }
};
constexpr Index grouped_row_tiles(const Routes& routes) { return routes.size() / kGroupedTile + routes.experts(); }

__device__ inline Matrix<const BFloat16> grouped_rows(Matrix<const BFloat16> m, Index begin, Index end) {
  return {m.row(begin), end - begin, m.cols, m.stride};
}

// y = x w_eᵀ, or x w_e, or the same added to y
template <bool TRANSPOSED>
__global__ void __launch_bounds__(kTileThreads, 2)
    grouped_kernel(Matrix<BFloat16> y, Matrix<const BFloat16> x, Matrix<const BFloat16> w, Routes routes, Update update,
                   bool aligned) {
  const Index tiles = ceil_div(y.cols, Index{kGroupedTile}), width = w.rows / routes.experts();
  const GroupedRows rows(routes, blockIdx.x / tiles);
  if (rows.begin >= rows.end) return;
  const Index col = blockIdx.x % tiles * kGroupedTile;
  const GroupedOperand<TRANSPOSED> weight = {grouped_rows(w, rows.group * width, (rows.group + 1) * width)};
  GroupedSums sums =
      grouped_product(GroupedOperand<false>{grouped_rows(x, rows.begin, rows.end)}, weight.from(col), aligned);
  const auto for_each = [&](auto&& f) {
    sums.for_each([&](float& sum, int m, int half, int column) {
      const Index i = rows.begin + grouped_row() + row_of(m, half), j = col + grouped_column() + column;
      if (i < rows.end && j < y.cols) f(sum, y(i, j));
    });
  };
  if (update == Update::add) for_each([](float& sum, const BFloat16& y) { sum += static_cast<float>(y); });
  for_each([](float sum, BFloat16& y) { y = sum; });
}

// dw_e += dyᵀ x for the rows of a tile of the stream at a time, the last tile first. Tile t adds to lane t mod lanes.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads, 2)
    grouped_weight_kernel(Matrix<float> dw, Matrix<const BFloat16> dy, Matrix<const BFloat16> x, Routes routes,
                          Index rows_of_tile, bool aligned) {
  const Index rows = routes.experts() * dy.cols, lanes = dw.rows / rows;
  const Index tiles = ceil_div(x.cols, Index{kGroupedTile}), outs = ceil_div(dy.cols, Index{kGroupedTile});
  const Index e = blockIdx.x / tiles / outs, out = blockIdx.x / tiles % outs * kGroupedTile,
              in = blockIdx.x % tiles * kGroupedTile;
  const Index first = routes.begin(0, e);
  for (Index begin, end = routes.begin(0, e + 1); end > first; end = begin) {
    const Index tile = routes.source(0, end - 1) / rows_of_tile;
    begin = first;
    for (Index high = end - 1; begin < high;) {  // the first row of the tile
      const Index middle = (begin + high) / 2;
      routes.source(0, middle) / rows_of_tile < tile ? begin = middle + 1 : high = middle;
    }
    GroupedSums sums = grouped_product(GroupedOperand<true>{grouped_rows(dy, begin, end)}.from(out),
                                       GroupedOperand<true>{grouped_rows(x, begin, end)}.from(in), aligned);
    const Matrix<float> to(dw.row(tile % lanes * rows + e * dy.cols), dy.cols, x.cols, dw.stride);
    const auto for_each = [&](auto&& f) {
      sums.for_each([&](float& sum, int m, int half, int column) {
        const Index i = out + grouped_row() + row_of(m, half), j = in + grouped_column() + column;
        if (i < dy.cols && j < x.cols) f(sum, to(i, j));
      });
    };
    // All loads come before the first store: a thread waits once.
    for_each([](float& sum, const float& dw) { sum += dw; });
    for_each([](float sum, float& dw) { dw = sum; });
  }
}

constexpr std::size_t grouped_bytes(bool a_transposed, bool b_transposed) {
  const int as_is = SharedTile<kGroupedTile, kGroupedInner>::kSize,
            other = SharedTile<kGroupedInner, kGroupedTile>::kSize;
  return sizeof(BFloat16) * kGroupedStages *
         static_cast<std::size_t>((a_transposed ? other : as_is) + (b_transposed ? other : as_is));
}

}  // namespace streambp::cuda
