// The gated delta rule, for each value head alone, with a state S of key_dim x value_dim numbers, zero before a document:
//
//   S = exp(g) S          S += k (β (v - Sᵀ k))ᵀ          o = Sᵀ q          q, k of unit length, q also / √key_dim
//
// Chunks depend on each other only through states: forward needs the state after the tile before the chunk, and backward the
// gradient of the state after its last tile. Memory: a state for each tile of the stream.
#pragma once

#include "kernels/base/device.cuh"
#include "kernels/delta_heads.h"
#ifdef STREAMBP_CUDA
#include "kernels/base/cuda.cuh"
#endif

namespace streambp {

// Memory for all key heads.
template <class T, class Device>
Matrix<Accumulator<T>> allocate_delta_memory(Device& dev, const DeltaShape& shape) {
  using A = Accumulator<T>;
  return allocate<A>(dev, shape.key_heads, DeltaMemory<A>(nullptr, shape).size, Kind::chunk);
}

// Products of a block of rows, over all heads.
inline double delta_flops(const DeltaShape& s, Index rows, double of_states, double of_values, double of_keys) {
  const double n = static_cast<double>(rows), block = kDeltaBlock, k = static_cast<double>(s.key_dim),
               v = static_cast<double>(s.value_dim), heads = static_cast<double>(s.value_heads);
  return 2 * n *
         (heads * (of_states * k * v + of_values * block * v + of_keys * block * k) +
          2 * block * k * static_cast<double>(s.key_heads));
}

// Writes the states after the chunk's tiles, and the output, unless that is empty.
template <class Device, class T>
void delta_rule(Device& dev, Matrix<T> out, const std::type_identity_t<DeltaInput<T>>& in,
                const DeltaSpan<Accumulator<T>>& span) {
  require_shape("delta rule", "v", in.v, span.rows.size(), span.shape.value_heads * span.shape.value_dim);
  auto scope = dev.scope();
  const auto memory = allocate_delta_memory<T>(dev, span.shape);
  auto op = dev.operation("delta rule", delta_flops(span.shape, span.rows.size(), out ? 3 : 2, out ? 1.5 : 0.5, 0),
                          sizeof(T) * (2.0 * in.v.size() + 2.0 * in.q.size()));
  if constexpr (Device::computes) compute_delta_rule(dev, out, in, span, memory);
}

// dstates: the gradients of the states after the chunk, complete. They become those of the states before it.
template <class Device, class T>
void delta_rule_backward(Device& dev, const DeltaGradient<T>& to, Matrix<Accumulator<T>> dstates, Input<T> dout,
                         const std::type_identity_t<DeltaInput<T>>& in, const DeltaSpan<Accumulator<T>>& span) {
  require_shape("delta rule backward", "dout", dout, in.v.rows, in.v.cols);
  auto scope = dev.scope();
  const auto memory = allocate_delta_memory<T>(dev, span.shape);
  auto op = dev.operation("delta rule backward", delta_flops(span.shape, span.rows.size(), 10, 4, 4),
                          sizeof(T) * (4.0 * in.v.size() + 4.0 * in.q.size()));
  if constexpr (Device::computes) compute_delta_rule_backward(dev, to, dstates, dout, in, span, memory);
}

// --- CPU: a thread for each key head ---

namespace cpu {

struct DeltaTeam {
  template <class F>
  void one(F&& f) const {
    f();
  }
  template <class F>
  void rows(Index rows, F&& f) const {
    for (Index i = 0; i < rows; ++i) f(i);
  }
  template <class F>
  void each(Index rows, Index cols, F&& f) const {
    for (Index i = 0; i < rows; ++i) {
#pragma omp simd
      for (Index j = 0; j < cols; ++j) f(i, j);
    }
  }
  template <class F>
  void columns(Index cols, F&& f) const {
    f(Rows{0, cols});
  }
  template <class F>
  auto sum(Index n, F&& f) const {
    return sum_of(n, f);
  }
  template <class A>
  void product(Matrix<A> c, Matrix<A> a, Op op_a, Matrix<A> b, Op op_b, Update update) const {
    for (Index i = 0; i < c.rows && update == Update::assign; ++i) std::fill_n(c.row(i), c.cols, A(0));
    gemm<A>(c, a, op_a, b, op_b);
  }
};

}  // namespace cpu

template <class T>
void compute_delta_rule(Cpu&, Matrix<T> out, const DeltaInput<T>& in, const DeltaSpan<Accumulator<T>>& span,
                        Matrix<Accumulator<T>> memory) {
#pragma omp parallel for schedule(dynamic)
  for (Index head = 0; head < span.shape.key_heads; ++head)
    DeltaHeads<cpu::DeltaTeam, T>({}, memory.row(head), in, span, head).forward(out);
}

template <class T>
void compute_delta_rule_backward(Cpu&, const DeltaGradient<T>& to, Matrix<Accumulator<T>> dstates, Input<T> dout,
                                 const DeltaInput<T>& in, const DeltaSpan<Accumulator<T>>& span,
                                 Matrix<Accumulator<T>> memory) {
#pragma omp parallel for schedule(dynamic)
  for (Index head = 0; head < span.shape.key_heads; ++head)
    DeltaHeads<cpu::DeltaTeam, T>({}, memory.row(head), in, span, head).backward(to, dstates, dout);
}

// --- CUDA: a block of threads for each key head ---

#ifdef STREAMBP_CUDA

namespace cuda {

constexpr int kDeltaThreads = 256;

struct DeltaTeam {
  template <class F>
  __device__ void one(F&& f) const {
    if (threadIdx.x == 0) f();
    __syncthreads();
  }
  template <class F>
  __device__ void rows(Index rows, F&& f) const {
    for (Index i = threadIdx.x; i < rows; i += kDeltaThreads) f(i);
    __syncthreads();
  }
  template <class F>
  __device__ void each(Index rows, Index cols, F&& f) const {
    for (Index i = threadIdx.x; i < rows * cols; i += kDeltaThreads) f(i / cols, i % cols);
    __syncthreads();
  }
  template <class F>
  __device__ void columns(Index cols, F&& f) const {
    for (Index j = threadIdx.x; j < cols; j += kDeltaThreads) f(Rows{j, j + 1});
    __syncthreads();
  }
  template <class F>
  __device__ auto sum(Index n, F&& f) const {
    auto sum = f(0);
    for (Index j = 1; j < n; ++j) sum += f(j);
    return sum;
  }
  __device__ void product(Matrix<float> c, Matrix<float> a, cpu::Op op_a, Matrix<float> b, cpu::Op op_b,
                          Update update) const {
    const Index inner = op_a == cpu::Op::as_is ? a.cols : a.rows;
    const Index a_step = op_a == cpu::Op::as_is ? 1 : a.stride, b_step = op_b == cpu::Op::as_is ? b.stride : 1;
    each(c.rows, c.cols, [&](Index i, Index j) {
      const float* x = op_a == cpu::Op::as_is ? a.row(i) : a.data + i;
      const float* y = op_b == cpu::Op::as_is ? b.data + j : b.row(j);
      float sum = 0;
      for (Index k = 0; k < inner; ++k) sum = multiply_add(x[k * a_step], y[k * b_step], sum);
      c(i, j) = update == Update::add ? c(i, j) + sum : sum;
    });
  }
};

template <class T>
__global__ void __launch_bounds__(kDeltaThreads, 1)
    delta_rule_kernel(Matrix<T> out, DeltaInput<T> in, DeltaSpan<float> span, Matrix<float> memory) {
  const Index head = blockIdx.x;
  DeltaHeads<DeltaTeam, T>({}, memory.row(head), in, span, head).forward(out);
}

template <class T>
__global__ void __launch_bounds__(kDeltaThreads, 1)
    delta_rule_backward_kernel(DeltaGradient<T> to, Matrix<float> dstates, Matrix<const T> dout, DeltaInput<T> in,
                               DeltaSpan<float> span, Matrix<float> memory) {
  const Index head = blockIdx.x;
  DeltaHeads<DeltaTeam, T>({}, memory.row(head), in, span, head).backward(to, dstates, dout);
}

}  // namespace cuda

template <class T>
void compute_delta_rule(Cuda& dev, Matrix<T> out, const DeltaInput<T>& in, const DeltaSpan<float>& span,
                        Matrix<float> memory) {
  cuda::launch(dev, cuda::delta_rule_kernel<T>, cuda::grid_of(span.shape.key_heads, 1), cuda::kDeltaThreads, 0, out, in,
               span, memory);
}

template <class T>
void compute_delta_rule_backward(Cuda& dev, const DeltaGradient<T>& to, Matrix<float> dstates, Input<T> dout,
                                 const DeltaInput<T>& in, const DeltaSpan<float>& span, Matrix<float> memory) {
  cuda::launch(dev, cuda::delta_rule_backward_kernel<T>, cuda::grid_of(span.shape.key_heads, 1), cuda::kDeltaThreads, 0,
               to, dstates, dout, in, span, memory);
}

#endif

}  // namespace streambp
