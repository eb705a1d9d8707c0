// Matrix products of groups of rows, each with its own weight: the experts' linear layers. The weights are one matrix,
// one below the other; group e has rows begin[e] to begin[e + 1] (kernels/routes.cuh).
//
//   forward          y  = x w_eᵀ               (or y += x w_eᵀ)
//   backward         dx = dy w_e              (or dx += dy w_e)
//                    dw_e += dyᵀ x
//
// Results are those of matmul.cuh on the rows of a group alone, and dw adds the rows of a tile of the stream at a time, the
// last tile first. So no bit depends on the chunk.
#pragma once

#include "kernels/matmul.cuh"
#include "kernels/routes.cuh"

#ifdef STREAMBP_CUDA
#include "kernels/grouped_tiles.cuh"
#endif

namespace streambp {

template <class Device, class T>
void grouped_matmul(Device& dev, Matrix<T> y, Input<T> x, Input<T> w, const Routes& routes, Update update) {
  require_shape("grouped matmul", "input", x, routes.size(), w.cols);
  require_shape("grouped matmul", "weight", w, routes.experts() * y.cols, x.cols);
  auto op = dev.operation("matmul", 2.0 * y.size() * w.cols,
                          sizeof(T) * (1.0 * x.size() + w.size() + y.size() * (update == Update::add ? 2.0 : 1.0)));
  if constexpr (Device::computes) compute_grouped_matmul(dev, y, x, w, routes, update);
}

template <class Device, class T>
void grouped_matmul_backward_input(Device& dev, Matrix<T> dx, Input<T> dy, Input<T> w, const Routes& routes,
                                   Update update) {
  require_shape("grouped matmul backward", "dx", dx, dy.rows, w.cols);
  require_shape("grouped matmul backward", "weight", w, routes.experts() * dy.cols, w.cols);
  auto op = dev.operation("matmul dx", 2.0 * dx.size() * dy.cols,
                          sizeof(T) * (dx.size() * (update == Update::add ? 2.0 : 1.0) + w.size() + dy.size()));
  if constexpr (Device::computes) compute_grouped_matmul_backward_input(dev, dx, dy, w, routes, update);
}

// dw: in one or several lanes; empty: the weights are frozen.
template <class Device, class T, class G>
void grouped_matmul_backward_weight(Device& dev, Matrix<G> dw, Matrix<T> dy, Input<T> x, const Routes& routes) {
  if (!dw) return;
  const Index rows = routes.experts() * dy.cols, lanes = dw.rows / rows;
  require_shape("grouped matmul backward", "dw", dw, lanes * rows, x.cols);
  auto op = dev.operation("matmul dw", 2.0 * x.size() * dy.cols,
                          2.0 * sizeof(G) * dw.size() + sizeof(T) * (1.0 * x.size() + dy.size()));
  if constexpr (Device::computes) compute_grouped_matmul_backward_weight(dev, dw, dy, x, routes);
}

// --- CPU ---

namespace cpu {

// Calls f(group, rows, columns) for pieces of all groups that have rows.
template <class F>
void for_each_piece_of_groups(const Routes& routes, Index cols, F&& f) {
  struct Piece {
    Index group;
    Rows rows, cols;
  };
  std::vector<Piece> pieces;
  const Index width = unit_columns(routes.size(), cols);
  for (Index e = 0; e < routes.experts(); ++e)
    for (Index begin = routes.begin(0, e), end = routes.begin(0, e + 1); begin < end; begin += kTile)
      for (Index b = 0; b < ceil_div(cols, width); ++b)
        pieces.push_back({e, {begin, least(begin + kTile, end)}, piece(b, width, cols)});
#pragma omp parallel for schedule(dynamic)
  for (const Piece& p : pieces) f(p.group, p.rows, p.cols);
}

}  // namespace cpu

template <class T>
void compute_grouped_matmul(Cpu&, Matrix<T> y, Input<T> x, Input<T> w, const Routes& routes, Update update) {
  cpu::for_each_piece_of_groups(routes, y.cols, [&](Index e, Rows rows, Rows cols) {
    const Matrix<T> unit = y.slice(rows).columns(cols);
    cpu::multiply_unit<T, T>(unit, x.slice(rows), w.lane(e, y.cols).slice(cols), {},
                             update == Update::add ? unit : Matrix<T>());
  });
}

template <class T>
void compute_grouped_matmul_backward_input(Cpu&, Matrix<T> dx, Input<T> dy, Input<T> w, const Routes& routes,
                                           Update update) {
  cpu::for_each_piece_of_groups(routes, dx.cols, [&](Index e, Rows rows, Rows cols) {
    cpu::multiply_input_unit<T, T>(dx.slice(rows).columns(cols), dy.slice(rows), w.lane(e, dy.cols).columns(cols),
                                   update);
  });
}

template <class T>
void compute_grouped_matmul_backward_weight(Cpu& dev, Matrix<Accumulator<T>> dw, Matrix<T> dy, Input<T> x,
                                            const Routes& routes) {
  const Index out = dy.cols, lanes = dw.rows / (routes.experts() * out), width = cpu::unit_columns(out, x.cols),
              outs = ceil_div(out, kTile), blocks = ceil_div(x.cols, width);
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (Index e = 0; e < routes.experts(); ++e) {
    for (Index unit = 0; unit < outs * blocks; ++unit) {
      const Rows some = piece(unit / blocks, kTile, out), cols = piece(unit % blocks, width, x.cols);
      Rows left = {routes.begin(0, e), routes.begin(0, e + 1)};
      while (left.size() > 0) {  // the rows of a tile, the last tile first
        const Index tile = routes.source(0, left.end - 1) / kTile, lane = tile * kTile / dev.tile % lanes;
        Rows rows = {left.end - 1, left.end};
        while (rows.begin > left.begin && routes.source(0, rows.begin - 1) / kTile == tile) --rows.begin;
        left.end = rows.begin;
        cpu::gemm<T>(dw.lane(lane, routes.experts() * out).lane(e, out).slice(some).columns(cols),
                     Input<T>(dy.slice(rows).columns(some)), cpu::Op::transposed, x.slice(rows).columns(cols),
                     cpu::Op::as_is);
      }
    }
  }
}

// --- CUDA: tiles on tensor cores; in float32, one thread for each element ---

#ifdef STREAMBP_CUDA

namespace cuda {

// Whether all rows start at multiples of 16 bytes and end there.
template <class... M>
bool in_pieces(const M&... matrices) {
  return ((matrices.cols % 8 == 0 && matrices.stride % 8 == 0 &&
           reinterpret_cast<std::uintptr_t>(matrices.data) % 16 == 0) &&
          ...);
}

// y = x w_eᵀ, or x w_e
template <bool TRANSPOSED, class T>
void grouped_product_of_rows(Cuda& dev, Matrix<T> y, Input<T> x, Input<T> w, const Routes& routes, Update update) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const Index blocks = grouped_row_tiles(routes) * ceil_div(y.cols, Index{kGroupedTile});
    return launch(dev, grouped_kernel<TRANSPOSED>, grid_of(blocks), kTileThreads, grouped_bytes(false, TRANSPOSED), y,
                  x, w, routes, update, in_pieces(x, w));
  }
  const Index width = w.rows / routes.experts();
  for_each_column(dev, y.rows, y.cols, [=] __device__(Index i, Index j) {
    const Index first = routes.expert_of(i) * width, step = TRANSPOSED ? w.stride : 1;
    const T *x_row = x.row(i), *weight = TRANSPOSED ? w.row(first) + j : w.row(first + j);
    float sum = update == Update::add ? static_cast<float>(y(i, j)) : 0;
    for (Index k = 0; k < x.cols; ++k)
      sum = multiply_add(static_cast<float>(x_row[k]), static_cast<float>(weight[k * step]), sum);
    y(i, j) = sum;
  });
}

}  // namespace cuda

template <class T>
void compute_grouped_matmul(Cuda& dev, Matrix<T> y, Input<T> x, Input<T> w, const Routes& routes, Update update) {
  cuda::grouped_product_of_rows<false>(dev, y, x, w, routes, update);
}

template <class T>
void compute_grouped_matmul_backward_input(Cuda& dev, Matrix<T> dx, Input<T> dy, Input<T> w, const Routes& routes,
                                           Update update) {
  cuda::grouped_product_of_rows<true>(dev, dx, dy, w, routes, update);
}

template <class T>
void compute_grouped_matmul_backward_weight(Cuda& dev, Matrix<float> dw, Matrix<T> dy, Input<T> x,
                                            const Routes& routes) {
  const Index tile = dev.tile;
  if constexpr (std::is_same_v<T, BFloat16>) {
    using namespace cuda;
    const Index tiles = ceil_div(dy.cols, Index{kGroupedTile}) * ceil_div(x.cols, Index{kGroupedTile});
    return launch(dev, grouped_weight_kernel, grid_of(routes.experts() * tiles), kTileThreads,
                  grouped_bytes(true, true), dw, dy, x, routes, tile, in_pieces(dy, x));
  }
  const Index rows = routes.experts() * dy.cols, lanes = dw.rows / rows;
  cuda::for_each_column(dev, rows, x.cols, [=] __device__(Index i, Index j) {
    const Index e = i / dy.cols;
    float sum = 0;
    for (Index p = routes.begin(0, e + 1) - 1, end = routes.begin(0, e); p >= end; --p) {
      const Index of = routes.source(0, p) / tile, lane = of % lanes;
      sum = multiply_add(static_cast<float>(dy(p, i % dy.cols)), static_cast<float>(x(p, j)), sum);
      if (p > end && routes.source(0, p - 1) / tile == of) continue;
      dw(lane * rows + i, j) += sum;
      sum = 0;
    }
  });
}

#endif

}  // namespace streambp
