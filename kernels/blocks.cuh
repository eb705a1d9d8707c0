// Dequantises weights that are stored as GGUF files store them (kernels/base/blocks.cuh).
#pragma once

#include "kernels/base/blocks.cuh"
#include "kernels/base/device.cuh"
#ifdef STREAMBP_CUDA
#include "kernels/base/packs.cuh"
#endif

namespace streambp {

struct Blocks {
  BlockType type = BlockType::none;
  Matrix<std::uint8_t> bytes;  // a row for each row of weights
  SwappedAxes columns = {};    // of the numbers of a row

  explicit operator bool() const { return static_cast<bool>(bytes); }
  Blocks slice(Rows rows) const { return {type, bytes.slice(rows), columns}; }
};

// w = the weights in the type of w, or rows of them. `later`: only counts the work.
template <class Device, class T>
void dequantise(Device& dev, Matrix<T> w, const Blocks& q, Matrix<const std::int32_t> rows = {}, bool later = false) {
  require(q.bytes.cols == bytes_of_row(q.type, w.cols), "blocks: rows of ", q.bytes.cols, " bytes, not of ", w.cols,
          " weights");
  require(rows ? rows.cols == w.rows : q.bytes.rows == w.rows, "blocks: ", q.bytes.rows, " rows, not ", w.rows);
  auto op = dev.operation("dequantise", 2.0 * w.size(), (1.0 * sizeof(T) * w.cols + q.bytes.cols) * w.rows);
  if constexpr (Device::computes)
    if (!later) compute_dequantise(dev, w, q, rows);
}

// --- CPU ---

template <class T>
void compute_dequantise(Cpu&, Matrix<T> w, const Blocks& q, Matrix<const std::int32_t> rows) {
#pragma omp parallel for if (w.size() > kWorthThreads)
  for (Index i = 0; i < w.rows; ++i)
    decode_row(q.type, q.bytes.row(rows ? rows(0, i) : i), w.cols, q.columns, w.row(i));
}

// --- CUDA ---

#ifdef STREAMBP_CUDA

namespace cuda {

template <int N>
__device__ Floats<N> dequantised(const Blocks& q, BlockSize size, Index row, Index j) {
  Floats<N> values;
  decode<N>(q.type, size, q.bytes.row(row), j, values.x);
  return values;
}

}  // namespace cuda

template <class T>
void compute_dequantise(Cuda& dev, Matrix<T> w, const Blocks& q, Matrix<const std::int32_t> rows) {
  const BlockSize size = size_of_block(q.type);
  auto f = [=] __device__(auto n, Index i, Index j) {
    cuda::store(w.row(i) + q.columns.original(j), cuda::dequantised<n()>(q, size, rows ? rows(0, i) : i, j));
  };
  cuda::for_each_pack(dev, w.rows, w.cols, f, w);
}

#endif

}  // namespace streambp
