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
#include "kernels/delta_team.cuh"
#endif

namespace streambp {

// Memory for so many teams. A GPU has part of it in shared memory.
template <class T, class Device>
Matrix<Accumulator<T>> allocate_delta_memory(Device& dev, const DeltaShape& shape, Index teams, const DeltaPart& part,
                                             DeltaPass pass) {
  const DeltaMemory<Accumulator<T>> one(nullptr, nullptr, shape, part, pass);
  return allocate<Accumulator<T>>(dev, teams, one.size + (dev.kind == DeviceKind::cuda ? 0 : one.near_size),
                                  Kind::chunk);
}
// For the passes that go through the rows in order
template <class T, class Device>
Matrix<Accumulator<T>> allocate_delta_states_memory(Device& dev, const DeltaShape& shape) {
  const bool gpu = dev.kind == DeviceKind::cuda;
  return allocate_delta_memory<T>(dev, shape, gpu ? narrow_parts(shape) : shape.key_heads,
                                  gpu ? narrow_part(shape, 0) : whole_part(shape, 0), DeltaPass::states);
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
  const auto memory = allocate_delta_states_memory<T>(dev, span.shape);
  auto op = dev.operation("delta rule", delta_flops(span.shape, span.rows.size(), out ? 3 : 2, out ? 1.5 : 0.5, 0),
                          sizeof(T) * (2.0 * in.v.size() + 2.0 * in.q.size()));
  if constexpr (Device::computes) compute_delta_rule(dev, out, in, span, memory);
}

// On a GPU, the gradients of the states come first, in order. Then so many teams at most go through the tiles, in any order.
constexpr Index kDeltaTeams = 128;
template <class A>
struct DeltaBackwardMemory {
  Matrix<A> teams;          // of DeltaPass::gradients
  Matrix<A> states, after;  // of a GPU: of DeltaPass::states; the gradients of the states after each tile
};

// dstates: the gradients of the states after the chunk, complete. They become those of the states before it.
template <class Device, class T>
void delta_rule_backward(Device& dev, const DeltaGradient<T>& to, Matrix<Accumulator<T>> dstates, Input<T> dout,
                         const std::type_identity_t<DeltaInput<T>>& in, const DeltaSpan<Accumulator<T>>& span) {
  require_shape("delta rule backward", "dout", dout, in.v.rows, in.v.cols);
  auto scope = dev.scope();
  const bool gpu = dev.kind == DeviceKind::cuda;
  const Index heads = span.shape.key_heads, tiles = ceil_div(span.rows.size(), kTile);
  DeltaBackwardMemory<Accumulator<T>> memory;
  memory.teams = allocate_delta_memory<T>(dev, span.shape, gpu ? least(heads * tiles, kDeltaTeams) : heads,
                                          whole_part(span.shape, 0), DeltaPass::gradients);
  if (gpu) {
    memory.after = allocate<Accumulator<T>>(dev, tiles, dstates.cols, Kind::chunk);
    memory.states = allocate_delta_states_memory<T>(dev, span.shape);
  }
  auto op = dev.operation("delta rule backward", delta_flops(span.shape, span.rows.size(), 10, 4, 4),
                          sizeof(T) * (4.0 * in.v.size() + 4.0 * in.q.size()));
  if constexpr (Device::computes) compute_delta_rule_backward(dev, to, dstates, dout, in, span, memory);
}

// --- CPU: a thread for each key head ---

namespace cpu {

struct DeltaTeam {
  template <class F>
  void by_thread(Index n, F&& f) const {
    for (Index i = 0; i < n; ++i) f(i);
  }
  template <class F>
  void by_warp(Index n, F&& f) const {
    for (Index i = 0; i < n; ++i) f(i);
  }
  template <class F>
  auto sum(Index n, F&& f) const {
    return sum_of(n, f);
  }
  template <class V, class F>
  V add(V sum, Rows range, F&& f) const {
    for (Index i = range.begin; i < range.end; ++i) sum += f(i);
    return sum;
  }
  template <class F>
  void across(Index n, F&& f) const {
    for (Index i = 0; i < n; ++i) f(i);
  }
  template <class F>
  void each(Index rows, Index cols, F&& f) const {
    for (Index i = 0; i < rows; ++i) {
#pragma omp simd
      for (Index j = 0; j < cols; ++j) f(i, j);
    }
  }
  template <class M, class F>
  void assign(Matrix<M> to, F&& f) const {
    each(to.rows, to.cols, [&](Index i, Index j) { to(i, j) = f(i, j); });
  }
  template <class A>
  void product(Matrix<A> c, Matrix<A> a, Op op_a, Matrix<A> b, Op op_b, Update update) const {
    for (Index i = 0; i < c.rows && update == Update::assign; ++i) std::fill_n(c.row(i), c.cols, A(0));
    gemm<A>(c, a, op_a, b, op_b);
  }
  // x becomes (I + t)⁻¹ x or (I + tᵀ)⁻¹ x; t is below the diagonal.
  template <class A>
  void solve(Matrix<A> t, Op op, Matrix<A> x) const {
    const auto subtract_row = [&](Index i, A factor, Index from) {
      for (Index j = 0; j < x.cols; ++j) x(i, j) = multiply_add(-factor, x(from, j), x(i, j));
    };
    for (Index n = 1; n < x.rows; ++n) {
      const Index i = op == Op::as_is ? n : x.rows - n;
      for (Index j = 0; j < i; ++j) op == Op::as_is ? subtract_row(i, t(i, j), j) : subtract_row(j, t(i, j), i);
    }
  }
};

}  // namespace cpu

template <class T>
void compute_delta_rule(Cpu&, Matrix<T> out, const DeltaInput<T>& in, const DeltaSpan<Accumulator<T>>& span,
                        Matrix<Accumulator<T>> memory) {
#pragma omp parallel for schedule(dynamic)
  for (Index head = 0; head < span.shape.key_heads; ++head) {
    const DeltaPart part = whole_part(span.shape, head);
    const DeltaMemory<Accumulator<T>> of_team(memory.row(head), nullptr, span.shape, part, DeltaPass::states);
    DeltaHeads<cpu::DeltaTeam, T>({}, of_team, in, span, part).forward(out);
  }
}

template <class T>
void compute_delta_rule_backward(Cpu&, const DeltaGradient<T>& to, Matrix<Accumulator<T>> dstates, Input<T> dout,
                                 const DeltaInput<T>& in, const DeltaSpan<Accumulator<T>>& span,
                                 const DeltaBackwardMemory<Accumulator<T>>& memory) {
#pragma omp parallel for schedule(dynamic)
  for (Index head = 0; head < span.shape.key_heads; ++head) {
    const DeltaPart part = whole_part(span.shape, head);
    const DeltaMemory<Accumulator<T>> of_team(memory.teams.row(head), nullptr, span.shape, part, DeltaPass::gradients);
    DeltaHeads<cpu::DeltaTeam, T>({}, of_team, in, span, part).backward(span.rows, to, dstates, dout);
  }
}

// --- CUDA: blocks of threads, for narrow parts or for tiles ---

#ifdef STREAMBP_CUDA

namespace cuda {

// The arithmetic of a part, in the memory of this block of threads.
template <class T>
__device__ DeltaHeads<DeltaTeam, T> delta_heads(const DeltaInput<T>& in, const DeltaSpan<float>& span,
                                                const Matrix<float>& memory, const DeltaPart& part, DeltaPass pass) {
  float* near = shared_memory<float>() + DeltaTeam::kSharedNumbers;
  return {DeltaTeam(), DeltaMemory<float>(memory.row(blockIdx.x), near, span.shape, part, pass), in, span, part};
}

template <class T>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_rule_kernel(Matrix<T> out, DeltaInput<T> in, DeltaSpan<float> span, Matrix<float> memory) {
  delta_heads<T>(in, span, memory, narrow_part(span.shape, blockIdx.x), DeltaPass::states).forward(out);
}

template <class T>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_states_backward_kernel(Matrix<float> after, Matrix<float> dstates, Matrix<const T> dout, DeltaInput<T> in,
                                 DeltaSpan<float> span, Matrix<float> memory) {
  delta_heads<T>(in, span, memory, narrow_part(span.shape, blockIdx.x), DeltaPass::states)
      .states_backward(after, dstates, dout);
}

template <class T>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_rule_backward_kernel(DeltaGradient<T> to, Matrix<float> after, Matrix<const T> dout, DeltaInput<T> in,
                               DeltaSpan<float> span, Matrix<float> memory) {
  for (Index i = blockIdx.x; i < after.rows * span.shape.key_heads; i += gridDim.x) {
    const Index tile = i / span.shape.key_heads, begin = span.rows.begin + tile * kTile;
    delta_heads<T>(in, span, memory, whole_part(span.shape, i % span.shape.key_heads), DeltaPass::gradients)
        .backward({begin, least(begin + kTile, span.rows.end)}, to, rows_of(after, tile, 1), dout);
  }
}

inline std::size_t delta_shared_bytes(const DeltaShape& s) {
  const DeltaMemory<float> one(nullptr, nullptr, s, whole_part(s, 0), DeltaPass::states);
  return static_cast<std::size_t>(DeltaTeam::kSharedNumbers + one.near_size) * sizeof(float);
}

}  // namespace cuda

template <class T>
void compute_delta_rule(Cuda& dev, Matrix<T> out, const DeltaInput<T>& in, const DeltaSpan<float>& span,
                        Matrix<float> memory) {
  cuda::launch(dev, cuda::delta_rule_kernel<T>, cuda::grid_of(memory.rows), cuda::kDeltaThreads,
               cuda::delta_shared_bytes(span.shape), out, in, span, memory);
}

template <class T>
void compute_delta_rule_backward(Cuda& dev, const DeltaGradient<T>& to, Matrix<float> dstates, Input<T> dout,
                                 const DeltaInput<T>& in, const DeltaSpan<float>& span,
                                 const DeltaBackwardMemory<float>& memory) {
  const std::size_t shared = cuda::delta_shared_bytes(span.shape);
  cuda::launch(dev, cuda::delta_states_backward_kernel<T>, cuda::grid_of(memory.states.rows), cuda::kDeltaThreads,
               shared, memory.after, dstates, dout, in, span, memory.states);
  cuda::launch(dev, cuda::delta_rule_backward_kernel<T>, cuda::grid_of(memory.teams.rows), cuda::kDeltaThreads, shared,
               to, memory.after, dout, in, span, memory.teams);
}

#endif

}  // namespace streambp
