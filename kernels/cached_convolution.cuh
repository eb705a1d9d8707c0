// A short convolution in generation: the rows of a chunk are the next tokens of several sequences, and a cache has the last
// rows before them.
#pragma once

#include "kernels/short_convolution.cuh"

namespace streambp {

// In generation. cache: u of the last width - 1 tokens of each sequence. The chunk's rows become the last ones.
template <class Device, class T>
void cached_convolution(Device& dev, Matrix<T> y, const std::type_identity_t<ConvolutionChunk<T>>& in, Matrix<T> cache,
                        const SequenceRows& rows) {
  require_shape("cached convolution", "output", y, rows.index.positions.cols, in.x.cols);
  auto op = dev.operation("convolution", (2.0 + 2 * in.width()) * y.size(), 4.0 * sizeof(T) * y.size());
  if constexpr (Device::computes) compute_cached_convolution(dev, y, in, cache, rows.index);
}

// The rows of several sequences in generation, column j.
template <class T>
struct CachedConvolution {
  using A = Accumulator<T>;

  ConvolutionChunk<T> in;
  Matrix<T> cache;
  SequenceIndex rows;

  // How many of the rows before row i belong to its sequence, up to a number.
  STREAMBP_INLINE Index before(Index i, Index most) const {
    Index n = 0;
    while (n < most && i > n && rows.sequences(0, i - n - 1) == rows.sequences(0, i)) ++n;
    return n;
  }
  STREAMBP_INLINE T* cached(Index i, Index back, Index j) const {
    return cache.row(edge_rows(rows.sequences(0, i) + 1, in.width()).begin - back) + j;
  }
  STREAMBP_INLINE Columns<1, A> u(Index i, Index j) const {
    if (!in.gated()) return load_columns<1, A>(in.x.row(i) + j);
    return rounded_product<1, A>(in.b.row(i) + j, in.x.row(i) + j);
  }

  STREAMBP_INLINE void forward(Matrix<T> y, Index i, Index j) const {
    const Index width = in.width(), here = before(i, width - 1);
    Columns<1, A> sum;
    for (Index k = least(width - 1, rows.positions(0, i)); k >= 0; --k) {
      const Columns<1, A> w = {{static_cast<A>(in.taps(j, width - 1 - k))}};
      add_product(sum, w, k <= here ? u(i - k, j) : load_columns<1, A>(cached(i, k - here, j)));
    }
    y(i, j) = in.gated() ? static_cast<A>(in.c(i, j)) * sum.at[0] : activated(Silu(), sum.at[0]);
  }
  // Row i is the last of its sequence: the rows of the sequence replace the oldest ones in the cache.
  STREAMBP_INLINE void update(Index i, Index j) const {
    const Index kept = in.width() - 1, added = before(i, kept - 1) + 1;
    for (Index back = kept; back > added; --back) *cached(i, back, j) = *cached(i, back - added, j);
    for (Index back = 1; back <= added; ++back) *cached(i, back, j) = u(i - back + 1, j).at[0];
  }
  STREAMBP_INLINE bool is_last(Index i) const {
    return i + 1 == rows.positions.cols || rows.sequences(0, i + 1) != rows.sequences(0, i);
  }
};

template <class T>
void compute_cached_convolution(Cpu&, Matrix<T> y, const ConvolutionChunk<T>& in, Matrix<T> cache,
                                const SequenceIndex& rows) {
  const CachedConvolution<T> cached = {in, cache, rows};
#pragma omp parallel for
  for (Index j = 0; j < y.cols; ++j) {
    for (Index i = 0; i < y.rows; ++i) cached.forward(y, i, j);
    for (Index i = 0; i < y.rows; ++i)
      if (cached.is_last(i)) cached.update(i, j);
  }
}

#ifdef STREAMBP_CUDA

template <class T>
void compute_cached_convolution(Cuda& dev, Matrix<T> y, const ConvolutionChunk<T>& in, Matrix<T> cache,
                                const SequenceIndex& rows) {
  const CachedConvolution<T> cached = {in, cache, rows};
  cuda::for_each_column(dev, y.rows, y.cols, [=] __device__(Index i, Index j) { cached.forward(y, i, j); });
  cuda::for_each_column(dev, y.rows, y.cols, [=] __device__(Index i, Index j) {
    if (cached.is_last(i)) cached.update(i, j);
  });
}

#endif

}  // namespace streambp
