// A row of attention's scores: its softmax, and the gradient of its scores. This file is compiled once for each instruction
// set: see inner_loops.h.

#include "kernels/base/inner_loops.h"
#include "kernels/base/math.cuh"
#include "kernels/base/row_sums.h"

namespace streambp::cpu::STREAMBP_INSTRUCTIONS {

// Scales and caps the visible scores.
template <class A>
void cap_scores(const ScoreRow<A>& row) {
  const auto [s, keys, visible, scale, cap] = row;
#pragma omp simd
  for (Index j = visible.begin; j < visible.end; ++j) s[j] = soft_capped(s[j] * scale, cap);
}

template <class A>
void hide(A* x, const ScoreRow<A>& row) {
  for (Index j = 0; j < row.visible.begin; ++j) x[j] = 0;
  for (Index j = row.visible.end; j < row.keys; ++j) x[j] = 0;
}

// x[j] = f(j) for visible columns, 0 elsewhere.
template <class A, class F>
void replace_row(A* x, const ScoreRow<A>& row, F&& f) {
#pragma omp simd
  for (Index j = row.visible.begin; j < row.visible.end; ++j) x[j] = f(j);
  hide(x, row);
}

template <class A, class T>
void round_row(T* to, const A* from, Index n) {
  if constexpr (std::is_same_v<A, T>) return;
  for (Index j = 0; j < n; ++j) to[j] = from[j];
}

template <class T>
void softmax_row(const ScoreRow<Accumulator<T>>& row, RunningSoftmax<Accumulator<T>>& running, Accumulator<T>* output,
                 Index dim, T* rounded) {
  using A = Accumulator<T>;
  A* const s = row.scores;
  if (row.cap > 0) cap_scores(row);
  const A scale = row.cap > 0 ? A(1) : row.scale;
  A maximum = running.maximum;
#pragma omp simd reduction(max : maximum)
  for (Index j = row.visible.begin; j < row.visible.end; ++j) {
    maximum = s[j] * scale > maximum ? s[j] * scale : maximum;
  }
  if (maximum > running.maximum) {
    const A shrink = running.sum == 0 ? A(0) : exponential(running.maximum - maximum);
    running.sum *= shrink;
    for (Index d = 0; d < dim; ++d) output[d] *= shrink;
    running.maximum = maximum;
  }
  A* const visible = s + row.visible.begin;
  running.sum +=
      sum_of(row.visible.size(), [=](Index j) { return visible[j] = exponential(visible[j] * scale - maximum); });
  hide(s, row);
  round_row(rounded, s, row.keys);
}

template <class T>
void softmax_backward_row(const ScoreRow<Accumulator<T>>& row, Accumulator<T>* ds, Accumulator<T> lse,
                          Accumulator<T> delta, T* rounded_p, T* rounded_ds) {
  using A = Accumulator<T>;
  A* const p = row.scores;
  const A scale = row.scale, cap = row.cap;
  if (cap > 0) {
    cap_scores(row);
    replace_row(ds, row, [=](Index j) { return (ds[j] - delta) * soft_cap_slope(p[j], cap); });
    replace_row(p, row, [=](Index j) { return exponential(p[j] - lse); });
    replace_row(ds, row, [=](Index j) { return p[j] * ds[j] * scale; });
  } else {
    replace_row(p, row, [=](Index j) { return exponential(p[j] * scale - lse); });
    replace_row(ds, row, [=](Index j) { return p[j] * (ds[j] - delta) * scale; });
  }
  round_row(rounded_p, p, row.keys);
  round_row(rounded_ds, ds, row.keys);
}

#define STREAMBP_SOFTMAX_ROWS(T)                                                                                       \
  template void softmax_row(const ScoreRow<Accumulator<T>>&, RunningSoftmax<Accumulator<T>>&, Accumulator<T>*, Index,  \
                            T*);                                                                                       \
  template void softmax_backward_row(const ScoreRow<Accumulator<T>>&, Accumulator<T>*, Accumulator<T>, Accumulator<T>, \
                                     T*, T*);
#ifndef __AVX512BF16__
STREAMBP_SOFTMAX_ROWS(float)
STREAMBP_SOFTMAX_ROWS(double)
#endif
STREAMBP_SOFTMAX_ROWS(BFloat16)

}  // namespace streambp::cpu::STREAMBP_INSTRUCTIONS
