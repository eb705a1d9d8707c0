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

// Memory for all teams. On a CPU there is one for each key head. On a GPU narrow parts go through the rows in order, and
// then, backward, so many teams at most through the tiles in any order.
constexpr Index kDeltaTeams = 128;
template <class A>
struct DeltaWork {
  Matrix<A> teams;          // all on a CPU; those of a GPU that go through tiles
  Matrix<A> narrow, after;  // of a GPU, for the parts; the gradients of the states after each tile
  DeltaKeys<A> keys;        // of a GPU, in training
};
template <class A, class Device>
DeltaWork<A> allocate_delta_work(Device& dev, const DeltaSpan<A>& span, DeltaPass pass) {
  const DeltaShape& s = span.shape;
  const Index rows = span.rows.size(), heads = s.key_heads, tiles = ceil_div(rows, kTile);
  const auto matrix = [&](Index rows, Index cols) { return allocate<A>(dev, rows, cols, Kind::chunk); };
  DeltaWork<A> work;
  const auto memory = [&](const DeltaPart& part, DeltaPass pass) {
    return DeltaMemory<A>(nullptr, nullptr, s, part, pass, work.keys);
  };
  if (dev.kind == DeviceKind::cpu) {
    const DeltaMemory<A> one = memory(whole_part(s, 0), pass);
    work.teams = matrix(heads, one.size + one.near_size);
    return work;
  }
  if (!span.cached) {  // in generation rows are few, and the memory is that of any number
    work.keys.q = matrix(rows, heads * s.key_dim), work.keys.k = matrix(rows, heads * s.key_dim);
    work.keys.p = matrix(rows, heads * kDeltaBlock), work.keys.w = matrix(rows, heads * kDeltaBlock);
  }
  work.narrow = matrix(narrow_parts(s), memory(narrow_part(s, 0), DeltaPass::states).size);
  if (pass == DeltaPass::gradients) {
    work.after = matrix(tiles, s.value_heads * s.key_dim * s.value_dim);
    work.teams = matrix(least(heads * tiles, kDeltaTeams), memory(whole_part(s, 0), pass).size);
  }
  return work;
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
  const auto work = allocate_delta_work(dev, span, DeltaPass::states);
  auto op = dev.operation("delta rule", delta_flops(span.shape, span.rows.size(), out ? 3 : 2, out ? 1.5 : 0.5, 0),
                          sizeof(T) * (2.0 * in.v.size() + 2.0 * in.q.size()));
  if constexpr (Device::computes) compute_delta_rule(dev, out, in, span, work);
}

// dstates: the gradients of the states after the chunk, complete. They become those of the states before it.
template <class Device, class T>
void delta_rule_backward(Device& dev, const DeltaGradient<T>& to, Matrix<Accumulator<T>> dstates, Input<T> dout,
                         const std::type_identity_t<DeltaInput<T>>& in, const DeltaSpan<Accumulator<T>>& span) {
  require_shape("delta rule backward", "dout", dout, in.v.rows, in.v.cols);
  auto scope = dev.scope();
  const auto work = allocate_delta_work(dev, span, DeltaPass::gradients);
  auto op = dev.operation("delta rule backward", delta_flops(span.shape, span.rows.size(), 10, 4, 4),
                          sizeof(T) * (4.0 * in.v.size() + 4.0 * in.q.size()));
  if constexpr (Device::computes) compute_delta_rule_backward(dev, to, dstates, dout, in, span, work);
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
  template <class M, class F>
  void assign(Matrix<M> to, F&& f) const {
    for (Index i = 0; i < to.rows; ++i) {
#pragma omp simd
      for (Index j = 0; j < to.cols; ++j) to(i, j) = f(i, j);
    }
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

// The arithmetic of a key head
template <class T, class A = Accumulator<T>>
DeltaHeads<DeltaTeam, T> delta_heads(const DeltaInput<T>& in, const DeltaSpan<A>& span, const DeltaWork<A>& work,
                                     Index head, DeltaPass pass) {
  const DeltaPart part = whole_part(span.shape, head);
  return {{}, {work.teams.row(head), nullptr, span.shape, part, pass, work.keys}, in, span, part};
}

}  // namespace cpu

template <class T>
void compute_delta_rule(Cpu&, Matrix<T> out, const DeltaInput<T>& in, const DeltaSpan<Accumulator<T>>& span,
                        const DeltaWork<Accumulator<T>>& work) {
#pragma omp parallel for schedule(dynamic)
  for (Index head = 0; head < span.shape.key_heads; ++head)
    cpu::delta_heads(in, span, work, head, DeltaPass::states).forward(out);
}

template <class T>
void compute_delta_rule_backward(Cpu&, const DeltaGradient<T>& to, Matrix<Accumulator<T>> dstates, Input<T> dout,
                                 const DeltaInput<T>& in, const DeltaSpan<Accumulator<T>>& span,
                                 const DeltaWork<Accumulator<T>>& work) {
#pragma omp parallel for schedule(dynamic)
  for (Index head = 0; head < span.shape.key_heads; ++head)
    cpu::delta_heads(in, span, work, head, DeltaPass::gradients).backward(span.rows, to, dstates, dout);
}

// --- CUDA: blocks of threads, for tiles or for narrow parts ---

#ifdef STREAMBP_CUDA

namespace cuda {

// The arithmetic of a part. memory: of all blocks of threads
template <class T>
__device__ DeltaHeads<DeltaTeam, T> delta_heads(const DeltaInput<T>& in, const DeltaSpan<float>& span,
                                                const DeltaKeys<float>& keys, float* memory, const DeltaPart& part,
                                                DeltaPass pass) {
  float* near = shared_memory<float>() + DeltaTeam::kSharedNumbers;
  return {{}, {memory, near, span.shape, part, pass, keys}, in, span, part};
}
__device__ inline Rows rows_of_tile(const DeltaSpan<float>& span, Index tile) {
  return {span.rows.begin + tile * kTile, least(span.rows.begin + (tile + 1) * kTile, span.rows.end)};
}

template <class T>
__global__ void __launch_bounds__(kDeltaThreads, 2)
    delta_keys_kernel(DeltaInput<T> in, DeltaSpan<float> span, DeltaKeys<float> keys) {
  const DeltaPart part = whole_part(span.shape, blockIdx.x);
  delta_heads<T>(in, span, keys, nullptr, part, DeltaPass::states).prepare(rows_of_tile(span, blockIdx.y));
}

template <class T>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_rule_kernel(Matrix<T> out, DeltaInput<T> in, DeltaSpan<float> span, DeltaWork<float> work) {
  const DeltaPart part = narrow_part(span.shape, blockIdx.x);
  delta_heads<T>(in, span, work.keys, work.narrow.row(blockIdx.x), part, DeltaPass::states).forward(out);
}

template <class T>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_states_backward_kernel(Matrix<float> dstates, Matrix<const T> dout, DeltaInput<T> in, DeltaSpan<float> span,
                                 DeltaWork<float> work) {
  const DeltaPart part = narrow_part(span.shape, blockIdx.x);
  delta_heads<T>(in, span, work.keys, work.narrow.row(blockIdx.x), part, DeltaPass::states)
      .states_backward(work.after, dstates, dout);
}

template <class T>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_rule_backward_kernel(DeltaGradient<T> to, Matrix<const T> dout, DeltaInput<T> in, DeltaSpan<float> span,
                               DeltaWork<float> work) {
  for (Index i = blockIdx.x; i < work.after.rows * span.shape.key_heads; i += gridDim.x) {
    const DeltaPart part = whole_part(span.shape, i % span.shape.key_heads);
    const Index tile = i / span.shape.key_heads;
    delta_heads<T>(in, span, work.keys, work.teams.row(blockIdx.x), part, DeltaPass::gradients)
        .backward(rows_of_tile(span, tile), to, rows_of(work.after, tile, 1), dout);
  }
}

template <class... Parameters, class... Arguments>
void launch_delta(Cuda& dev, void (*kernel)(Parameters...), dim3 grid, const DeltaShape& s, Arguments... arguments) {
  const DeltaMemory<float> one(nullptr, nullptr, s, whole_part(s, 0), DeltaPass::states, {});
  const auto numbers = static_cast<std::size_t>(DeltaTeam::kSharedNumbers + one.near_size);
  launch(dev, kernel, grid, kDeltaThreads, numbers * sizeof(float), arguments...);
}

}  // namespace cuda

template <class T>
void compute_delta_rule(Cuda& dev, Matrix<T> out, const DeltaInput<T>& in, const DeltaSpan<float>& span,
                        const DeltaWork<float>& work) {
  const DeltaShape& s = span.shape;
  if (work.keys.q)
    cuda::launch_delta(dev, cuda::delta_keys_kernel<T>, cuda::grid_of(s.key_heads, ceil_div(span.rows.size(), kTile)),
                       s, in, span, work.keys);
  cuda::launch_delta(dev, cuda::delta_rule_kernel<T>, cuda::grid_of(work.narrow.rows), s, out, in, span, work);
}

template <class T>
void compute_delta_rule_backward(Cuda& dev, const DeltaGradient<T>& to, Matrix<float> dstates, Input<T> dout,
                                 const DeltaInput<T>& in, const DeltaSpan<float>& span, const DeltaWork<float>& work) {
  const DeltaShape& s = span.shape;
  cuda::launch_delta(dev, cuda::delta_keys_kernel<T>, cuda::grid_of(s.key_heads, work.after.rows), s, in, span,
                     work.keys);
  cuda::launch_delta(dev, cuda::delta_states_backward_kernel<T>, cuda::grid_of(work.narrow.rows), s, dstates, dout, in,
                     span, work);
  cuda::launch_delta(dev, cuda::delta_rule_backward_kernel<T>, cuda::grid_of(work.teams.rows), s, to, dout, in, span,
                     work);
}

#endif

}  // namespace streambp
