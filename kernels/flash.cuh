// Attention in bfloat16 on tensor cores, tile by tile; see attention.cuh for the formulas, and flash/ for the kernels.
//
// The scores of a tile never leave the registers, because the result of one product already has the layout of the next
// product's left operand. Copies from global memory overlap with tensor-core work: the operand needed first is loaded
// one tile ahead.
#pragma once

#include <concepts>

#include "kernels/flash/backward.cuh"
#include "kernels/flash/forward.cuh"

namespace streambp {

namespace cuda {

template <int DIM>
using Dim = std::integral_constant<int, DIM>;

// Calls f(dim, capped): the smallest size of a kernel that holds the heads, and whether scores are capped. Few models have
// a cap, so its kernels come in fewer sizes.
template <class F>
void with_kernel_for(const AttentionShape& shape, F&& f) {
  const Index dim = shape.head_dim;
  constexpr std::true_type capped;
  constexpr std::false_type plain;
  require(dim <= (shape.score_cap > 0 ? 256 : 512), "attention: heads of ", dim, " are too wide for a GPU");
  if (shape.score_cap > 0) return dim <= 128 ? f(Dim<128>(), capped) : f(Dim<256>(), capped);
  if (dim <= 32) return f(Dim<32>(), plain);
  if (dim <= 64) return f(Dim<64>(), plain);
  if (dim <= 80) return f(Dim<80>(), plain);
  if (dim <= 96) return f(Dim<96>(), plain);
  if (dim <= 128) return f(Dim<128>(), plain);
  dim <= 256 ? f(Dim<256>(), plain) : f(Dim<512>(), plain);
}

// dout: in the backward pass
inline FlashInput flash_input(const AttentionInput<BFloat16>& in, const AttentionSpan& span,
                              Matrix<const BFloat16> dout = {}) {
  bool aligned = span.shape.head_dim % 8 == 0;
  for (const auto& m : {in.q, in.k, in.v, dout})
    aligned = aligned && m.stride % 8 == 0 && reinterpret_cast<std::uintptr_t>(m.data) % 16 == 0;
  const auto scale = static_cast<float>(span.shape.scale()), cap = static_cast<float>(span.shape.score_cap) / scale;
  return {in.q, in.k, in.v, span.mask.key_begin, span.rows, span.shape, scale, cap, aligned};
}

// The tiles of `size` rows that cover the span's rows.
struct TilesOf {
  Index last, count;
  TilesOf(Rows rows, Index size) : last((rows.end - 1) / size), count(last - rows.begin / size + 1) {}
};

}  // namespace cuda

// Templates, so that nvcc compiles the kernels, which takes a minute, only where they are used.
template <std::same_as<BFloat16> T>
void compute_attention(Cuda& dev, const AttentionOutput<T>& out, const AttentionInput<T>& in,
                       const AttentionSpan& span) {
  const AttentionShape& shape = span.shape;
  const cuda::FlashInput input = cuda::flash_input(in, span);
  cuda::with_kernel_for(shape, [&](auto dim, auto capped) {
    constexpr int queries = cuda::Flash<dim()>::kQueries;
    const cuda::TilesOf tiles(span.rows, queries);
    cuda::launch(dev, cuda::flash_kernel<dim(), capped()>, cuda::grid_of(tiles.count, shape.heads), cuda::kTileThreads,
                 cuda::FlashMemory<dim(), queries>::kBytes, input, out, static_cast<int>(tiles.last));
  });
}

template <std::same_as<BFloat16> T>
void compute_attention_backward(Cuda& dev, const AttentionGradient<T>& gradient, const AttentionUpstream<T>& upstream,
                                const AttentionInput<T>& in, const AttentionSpan& span) {
  const AttentionShape& shape = span.shape;
  const cuda::FlashInput input = cuda::flash_input(in, span, upstream.dout);
  cuda::with_kernel_for(shape, [&](auto dim, auto capped) {
    using Size = cuda::Flash<dim()>;
    const cuda::TilesOf tiles(span.rows, Size::kQueries);
    cuda::launch(dev, cuda::flash_queries_kernel<dim(), capped()>, cuda::grid_of(tiles.count, shape.heads),
                 cuda::kTileThreads, cuda::FlashQueriesMemory<dim()>::kBytes, input, upstream, gradient.dq,
                 static_cast<int>(tiles.last));
    cuda::launch(dev, cuda::flash_keys_kernel<dim(), capped()>,
                 cuda::grid_of(ceil_div(span.rows.end, Size::kKeys), shape.kv_heads * Size::kPieces),
                 cuda::kTileThreads, cuda::FlashKeysMemory<dim()>::kBytes, input, upstream, gradient.dk, gradient.dv);
  });
}

}  // namespace streambp
