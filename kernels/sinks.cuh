// Attention sinks: a number of each head takes part in the softmax of its scores, as if one more key had this score and no
// value. So attention can choose nothing. With the lse of the scores alone:
//
//   forward          O *= σ(lse - sink)          lse = log(exp(lse) + exp(sink))
//   backward         attention's own, which reads this O and this lse, and dsink = -Σ_rows exp(sink - lse) rowsum(dO * O)
#pragma once

#include "kernels/attention.cuh"
#include "kernels/elementwise.cuh"

namespace streambp {

// Row i of head h
template <class T>
struct AddSinks {
  using A = Accumulator<T>;
  AttentionOutput<T> out;
  Matrix<const T> sinks;
  Index dim;
  STREAMBP_INLINE void operator()(Index i, Index h) const {
    const A lse = out.lse(i, h), sink = sinks(0, h), share = sigmoid(lse - sink);
    T* o = out.attended.row(i) + h * dim;
    for (Index d = 0; d < dim; ++d) o[d] = share * A(o[d]);
    out.lse(i, h) = static_cast<A>(double(lse) + softplus(double(sink) - double(lse)));
  }
};
// terms: rowsum(dO * O). They become those of dsink.
template <class T>
struct SinkTerms {
  using A = Accumulator<T>;
  Matrix<A> terms;
  Matrix<const A> lse;
  Matrix<const T> sinks;
  STREAMBP_INLINE void operator()(Index i, Index h) const { terms(i, h) *= -exponential(A(sinks(0, h)) - lse(i, h)); }
};

// out: of attention without sinks. sinks: a row, with a column for each head
template <class Device, class T>
void add_sinks(Device& dev, const AttentionOutput<T>& out, std::type_identity_t<Input<T>> sinks) {
  require_shape("sinks", "sinks", sinks, 1, out.lse.cols);
  const Index dim = out.attended.cols / out.lse.cols;
  auto op = dev.operation("sinks", 60.0 * out.lse.size() + out.attended.size(), 2.0 * sizeof(T) * out.attended.size());
  if constexpr (Device::computes) compute_elements(dev, out.lse.rows, out.lse.cols, AddSinks<T>{out, sinks, dim});
}

// out: with sinks. terms: a row of terms of dsink for each row.
template <class Device, class T>
void sinks_backward(Device& dev, Matrix<Accumulator<T>> terms, Input<T> dout, const AttentionOutput<T>& out,
                    std::type_identity_t<Input<T>> sinks) {
  require_shape("sinks backward", "dout", dout, out.attended.rows, out.attended.cols);
  require_shape("sinks backward", "terms", terms, out.lse.rows, out.lse.cols);
  auto op = dev.operation("sinks backward", 2.0 * dout.size() + 30.0 * terms.size(), 2.0 * sizeof(T) * dout.size());
  if constexpr (Device::computes) {
    compute_attention_delta<T>(dev, terms, dout, out.attended);
    compute_elements(dev, terms.rows, terms.cols, SinkTerms<T>{terms, out.lse, sinks});
  }
}

}  // namespace streambp
