// Attention in float32 on the GPU, for verification: one warp per row and head. The warp loops over keys (or queries)
// in tiles of 32: each thread of a warp computes one score, and then sums some of the head's columns over all 32.
#pragma once

#include "kernels/attention_shape.h"
#include "kernels/base/cuda.cuh"
#include "kernels/base/math.cuh"

namespace streambp {

namespace cuda {

constexpr int kPlainWarps = 4, kPlainThreads = kPlainWarps * kWarp, kMostDims = 512;

struct PlainInput {
  Matrix<const float> q, k, v;
  Matrix<const std::int32_t> key_begin;
  Rows rows;
  AttentionShape shape;
  float scale, cap;
  Pages pages = {};

  // The score of a product of query and key.
  __device__ float score(float product) const { return cap > 0 ? soft_capped(product * scale, cap) : product * scale; }
};
static_assert(kPage % kWarp == 0);

__device__ inline float dot(const float* a, const float* b, Index n) {
  float sum = 0;
  for (Index j = 0; j < n; ++j) sum = multiply_add(a[j], b[j], sum);
  return sum;
}

// The columns of a head that a thread sums: its lane of the warp, that + 32, ...
struct HeadSum {
  float x[kMostDims / kWarp] = {};

  template <class F>
  __device__ void for_each(Index dim, F&& f) {
    for (int i = 0; i < kMostDims / kWarp; ++i) {
      const Index d = threadIdx.x % kWarp + i * kWarp;
      if (d < dim) f(x[i], d);
    }
  }
};

// The warps of a thread block process consecutive rows. blockIdx.y is the head.
__device__ inline Index row_of_warp() { return static_cast<Index>(blockIdx.x) * kPlainWarps + threadIdx.x / kWarp; }

// Row i of q and head h.
__device__ inline void plain_attend(const PlainInput& in, Index i, Index h, const AttentionOutput<float>& out) {
  const Index dim = in.shape.head_dim, row = in.rows.begin + i;
  const Index kv = h / in.shape.group() * dim, lane = threadIdx.x % kWarp;
  float* p = shared_memory<float[kWarp]>()[threadIdx.x / kWarp];
  const float* q = in.q.row(i) + h * dim;
  const Rows keys = keys_of(row, in.key_begin, in.shape.window);
  HeadSum o;
  float maximum = -INFINITY, sum = 0;
  for (Index begin = keys.begin / kWarp * kWarp; begin < keys.end; begin += kWarp) {
    const Index key = begin + lane, shift = in.pages.shift(begin);
    const bool visible = keys.begin <= key && key < keys.end;
    const float s = visible ? in.score(dot(q, in.k.row(key + shift) + kv, dim)) : -INFINITY;
    const float now = fmaxf(maximum, warp_max(s)), shrink = maximum == -INFINITY ? 0 : exponential(maximum - now);
    p[lane] = visible ? exponential(s - now) : 0;
    sum = multiply_add(sum, shrink, warp_sum(p[lane]));
    maximum = now;
    __syncwarp();
    o.for_each(dim, [&](float& x, Index d) {
      x *= shrink;
      for (Index j = most(begin, keys.begin); j < least(begin + kWarp, keys.end); ++j) {
        x = multiply_add(p[j - begin], in.v(j + shift, kv + d), x);
      }
    });
    __syncwarp();
  }
  o.for_each(dim, [&](float x, Index d) { out.attended(i, h * dim + d) = x / sum; });
  if (lane == 0) out.lse(i, h) = maximum + std::log(sum);
}

static __global__ void __launch_bounds__(kPlainThreads)
    plain_attention_kernel(PlainInput in, AttentionOutput<float> out) {
  const Index i = row_of_warp();
  if (in.rows.begin + i < in.rows.end) plain_attend(in, i, blockIdx.y, out);
}

// P and dS of one query and one key.
struct Score {
  float p, ds;
  __device__ Score(const PlainInput& in, const AttentionUpstream<float>& upstream, Index i, Index h, Index key) {
    const Index dim = in.shape.head_dim, kv = h / in.shape.group() * dim;
    const float s = in.score(dot(in.q.row(i) + h * dim, in.k.row(key) + kv, dim));
    const float dp = dot(upstream.dout.row(i) + h * dim, in.v.row(key) + kv, dim);
    p = exponential(s - upstream.lse(i, h));
    ds = p * (dp - upstream.delta(i, h)) * in.scale;
    if (in.cap > 0) ds *= soft_cap_slope(s, in.cap);
  }
  __device__ Score() : p(0), ds(0) {}
};

static __global__ void __launch_bounds__(kPlainThreads)
    plain_queries_kernel(PlainInput in, AttentionUpstream<float> upstream, Matrix<float> dq) {
  const Index i = row_of_warp(), h = blockIdx.y, dim = in.shape.head_dim, row = in.rows.begin + i;
  if (row >= in.rows.end) return;
  const Index kv = h / in.shape.group() * dim, lane = threadIdx.x % kWarp;
  Score* scores = shared_memory<Score[kWarp]>()[threadIdx.x / kWarp];
  const Rows keys = keys_of(row, in.key_begin, in.shape.window);
  HeadSum sum;
  for (Index begin = keys.begin / kWarp * kWarp; begin < keys.end; begin += kWarp) {
    const Index key = begin + lane;
    scores[lane] = keys.begin <= key && key < keys.end ? Score(in, upstream, i, h, key) : Score();
    __syncwarp();
    sum.for_each(dim, [&](float& x, Index d) {
      for (Index j = most(begin, keys.begin); j < least(begin + kWarp, keys.end); ++j) {
        x = multiply_add(scores[j - begin].ds, in.k(j, kv + d), x);
      }
    });
    __syncwarp();
  }
  sum.for_each(dim, [&](float x, Index d) { dq(i, h * dim + d) = x; });
}

// Queries in tiles of 32, from last to first, and for each tile the heads of the group.
static __global__ void __launch_bounds__(kPlainThreads)
    plain_keys_kernel(PlainInput in, AttentionUpstream<float> upstream, Matrix<float> dk, Matrix<float> dv) {
  const Index key = row_of_warp(), kv_head = blockIdx.y, dim = in.shape.head_dim, lane = threadIdx.x % kWarp;
  const Index group = in.shape.group(), kv = kv_head * dim, first_row = most(key, in.rows.begin);
  if (key >= in.rows.end) return;
  Score* scores = shared_memory<Score[kWarp]>()[threadIdx.x / kWarp];
  HeadSum dk_sum, dv_sum;
  dk_sum.for_each(dim, [&](float& x, Index d) { x = dk(key, kv + d); });
  dv_sum.for_each(dim, [&](float& x, Index d) { x = dv(key, kv + d); });
  for (Index begin = (in.rows.end - 1) / kWarp * kWarp; begin + kWarp > first_row; begin -= kWarp) {
    const Index row = begin + lane, last = least(begin + kWarp, in.rows.end) - 1;
    if (keys_of(most(begin, in.rows.begin), in.key_begin, in.shape.window).begin > key) continue;
    for (Index h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      const bool sees = first_row <= row && row <= last && keys_of(row, in.key_begin, in.shape.window).begin <= key;
      scores[lane] = sees ? Score(in, upstream, row - in.rows.begin, h, key) : Score();
      __syncwarp();
      auto add_up = [&](HeadSum& sum, Matrix<const float> m, float Score::*weight) {
        sum.for_each(dim, [&](float& x, Index d) {
          for (Index j = last; j >= most(begin, first_row); --j) {
            x = multiply_add(scores[j - begin].*weight, m(j - in.rows.begin, h * dim + d), x);
          }
        });
      };
      add_up(dv_sum, upstream.dout, &Score::p);
      add_up(dk_sum, in.q, &Score::ds);
      __syncwarp();
    }
  }
  dk_sum.for_each(dim, [&](float x, Index d) { dk(key, kv + d) = x; });
  dv_sum.for_each(dim, [&](float x, Index d) { dv(key, kv + d) = x; });
}

// delta = rowsum(dO * O) of each head, for float32 and bfloat16
template <class T>
__global__ void __launch_bounds__(kPlainThreads)
    attention_delta_kernel(Matrix<float> delta, Matrix<const T> dout, Matrix<const T> out, Index dim) {
  const Index i = row_of_warp(), h = blockIdx.y;
  if (i >= delta.rows) return;
  float sum = 0;
  for (Index d = h * dim + threadIdx.x % kWarp; d < (h + 1) * dim; d += kWarp) {
    sum = multiply_add(static_cast<float>(dout(i, d)), static_cast<float>(out(i, d)), sum);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) delta(i, h) = sum;
}

inline PlainInput plain_input(const AttentionInput<float>& in, const AttentionSpan& span) {
  require(span.shape.head_dim <= kMostDims, "attention: heads of ", span.shape.head_dim, " are wider than the ",
          kMostDims, " supported on a GPU");
  const auto scale = static_cast<float>(span.shape.scale()), cap = static_cast<float>(span.shape.score_cap);
  return {in.q, in.k, in.v, span.mask.key_begin, span.rows, span.shape, scale, cap};
}

inline dim3 plain_grid(Index rows, Index heads) { return grid_of(ceil_div(rows, kPlainWarps), heads); }

}  // namespace cuda

template <class T>
void compute_attention_delta(Cuda& dev, Matrix<float> delta, Input<T> dout, Input<T> out) {
  cuda::launch(dev, cuda::attention_delta_kernel<T>, cuda::plain_grid(delta.rows, delta.cols), cuda::kPlainThreads, 0,
               delta, dout, out, out.cols / delta.cols);
}

inline void compute_attention(Cuda& dev, const AttentionOutput<float>& out, const AttentionInput<float>& in,
                              const AttentionSpan& span) {
  cuda::launch(dev, cuda::plain_attention_kernel, cuda::plain_grid(span.rows.size(), span.shape.heads),
               cuda::kPlainThreads, cuda::kPlainThreads * sizeof(float), cuda::plain_input(in, span), out);
}

inline void compute_attention_backward(Cuda& dev, const AttentionGradient<float>& gradient,
                                       const AttentionUpstream<float>& upstream, const AttentionInput<float>& in,
                                       const AttentionSpan& span) {
  const cuda::PlainInput input = cuda::plain_input(in, span);
  constexpr std::size_t shared = cuda::kPlainThreads * sizeof(cuda::Score);
  cuda::launch(dev, cuda::plain_queries_kernel, cuda::plain_grid(span.rows.size(), span.shape.heads),
               cuda::kPlainThreads, shared, input, upstream, gradient.dq);
  cuda::launch(dev, cuda::plain_keys_kernel, cuda::plain_grid(span.rows.end, span.shape.kv_heads), cuda::kPlainThreads,
               shared, input, upstream, gradient.dk, gradient.dv);
}

}  // namespace streambp
