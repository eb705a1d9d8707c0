// Causal grouped-query attention over the token stream. Row i attends to keys [first(i), i]:
//
//   first(i) = max(key_begin[i], i - window + 1)         key_begin: the start of the document of row i
//
//   forward          S = scale Q Kᵀ        P = softmax(S)        O = P V        lse = log Σ exp(S)
//   backward         P = exp(S - lse)      dV += Pᵀ dO           dP = dO Vᵀ
//                    dS = P * (dP - rowsum(dO * O))
//                    dQ = scale dS K       dK += scale dSᵀ Q
//
// Some models cap the scores: S = cap tanh(scale Q Kᵀ / cap). Then dS is also multiplied by the slope 1 - (S / cap)².
//
// Computed in tiles of queries x keys, so no N x N matrix exists. The forward pass keeps a running maximum and sum per
// row (online softmax): when a tile of keys raises the maximum, the sums so far are rescaled.
//
// Forward takes two products of 2 FLOPs for each number of a head and pair of query and key, and backward takes five. A GPU
// has a kernel for dQ and one for dK and dV, and both compute S and dP: seven products. Where two warps share the rows of a
// wide head (kernels/flash/tiles.cuh), both compute S: three products, and fifteen.
//
// A call computes the query rows span.rows of the stream against keys 0 .. span.rows.end. dK and dV are summed over
// tiles of queries from last to first. This order is the same for any chunk.
#pragma once

#include "kernels/attention_shape.h"
#include "kernels/base/device.cuh"
#include "kernels/base/matrix.cuh"
#include "kernels/cpu_attention_backward.h"
#ifdef STREAMBP_CUDA
#include "kernels/flash.cuh"
#include "kernels/plain_attention.cuh"
#endif

namespace streambp {

struct AttentionProducts {
  double forward, backward;
};
template <class T>
AttentionProducts products_of(DeviceKind device, const AttentionShape& shape) {
  if (device != DeviceKind::cuda) return {2, 5};
  return sizeof(T) == 2 && shape.head_dim > 256 ? AttentionProducts{3, 15} : AttentionProducts{2, 7};
}

// Memory for `count` rows of sums over a segment: P V of all heads, and then the maximum and the sum of each head. Empty if
// `keys` keys have one segment.
template <class T, class Device>
Matrix<Accumulator<T>> allocate_sums(Device& dev, Index count, Index keys, const AttentionShape& shape) {
  const bool cuts = !std::is_same_v<T, Accumulator<T>> && dev.kind == DeviceKind::cuda && shape.window == 0;
  if (!cuts || keys <= kSegment) return {};
  return allocate<Accumulator<T>>(dev, count, shape.q_width() + 2 * shape.heads, Kind::chunk);
}

template <class Device, class T>
void attention(Device& dev, const AttentionOutput<T>& out, const std::type_identity_t<AttentionInput<T>>& in,
               const AttentionSpan& span) {
  const auto& [mask, rows, shape] = span;
  const Index q_width = shape.heads * shape.head_dim, kv_width = shape.kv_heads * shape.head_dim;
  require_shape("attention", "queries", in.q, rows.size(), q_width);
  require_shape("attention", "output", out.attended, rows.size(), q_width);
  require_shape("attention", "lse", out.lse, rows.size(), shape.heads);
  require(in.k.cols == kv_width && in.v.cols == kv_width && in.k.rows >= rows.end && in.v.rows >= rows.end,
          "attention: keys or values are too small");
  auto scope = dev.scope();
  const auto sums = allocate_sums<T>(dev, rows.size(), rows.end, shape);
  auto op = dev.operation(
      "attention", 2 * products_of<T>(dev.kind, shape).forward * attention_pairs(span) * static_cast<double>(q_width),
      sizeof(T) * (2.0 * in.q.size() + 2.0 * kv_width * rows.end));
  if constexpr (Device::computes) compute_attention(dev, AttentionOutput<T>{out.attended, out.lse, sums}, in, span);
}

// The memory in which dQ is summed. A GPU sums it in registers.
template <class Device, class T>
Matrix<Accumulator<T>> allocate_dq_sums(Device& dev, Matrix<T> dq) {
  if constexpr (std::is_same_v<T, Accumulator<T>>) {
    return dq;
  } else {
    if (dev.kind == DeviceKind::cuda) return {};
    return allocate<Accumulator<T>>(dev, dq.rows, dq.cols, Kind::chunk);
  }
}

// Writes dq. Adds to dk and dv for all rows up to span.rows.end.
template <class Device, class T>
void attention_backward(Device& dev, const AttentionGradient<T>& gradient, Input<T> dout,
                        const std::type_identity_t<AttentionInput<T>>& in,
                        const std::type_identity_t<AttentionOutput<T>>& out, const AttentionSpan& span) {
  using A = Accumulator<T>;
  const auto& [mask, rows, shape] = span;
  const Index q_width = shape.heads * shape.head_dim, kv_width = shape.kv_heads * shape.head_dim;
  require_shape("attention backward", "dout", dout, rows.size(), q_width);
  require_shape("attention backward", "dq", gradient.dq, rows.size(), q_width);
  require(gradient.dk.cols == kv_width && gradient.dv.cols == kv_width && gradient.dk.rows >= rows.end &&
              gradient.dv.rows >= rows.end,
          "attention backward: dk or dv is too small");
  auto scope = dev.scope();
  const auto delta = allocate<A>(dev, rows.size(), shape.heads, Kind::chunk);
  const AttentionGradient<T> sums = {gradient.dq, gradient.dk, gradient.dv, allocate_dq_sums(dev, gradient.dq)};
  auto op = dev.operation(
      "attention backward",
      2 * products_of<T>(dev.kind, shape).backward * attention_pairs(span) * static_cast<double>(q_width),
      sizeof(T) * (4.0 * in.q.size() + 2.0 * kv_width * rows.end) + sizeof(A) * 4.0 * kv_width * rows.end);
  if constexpr (Device::computes) {
    compute_attention_delta<T>(dev, delta, dout, out.attended);
    compute_attention_backward(dev, sums, AttentionUpstream<T>{dout, out.lse, delta}, in, span);
  }
}

}  // namespace streambp
