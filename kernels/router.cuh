// The router of a mixture of experts: each row chooses some of all experts, and gives each of them a weight.
//
//   softmax        p = softmax(x)      chosen: the experts with the largest p             weight = p
//   sigmoid        p = σ(x)            chosen: the experts with the largest p + bias      weight = p
//   renormalised   weight = p / (Σ_chosen p + eps)
//
// All weights are multiplied by a scale. Of equal experts the first are chosen. For backward the choice is a constant. With
// u = weight / scale, du = scale dweight, and t = Σ_chosen u du, which is 0 for a sigmoid without renormalisation:
//
//   dx = u (du - t)       of an expert that is chosen, times 1 - p for a sigmoid
//   dx = -u t             of another one, for a softmax without renormalisation; else 0
#pragma once

#include "kernels/elementwise.cuh"

namespace streambp {

enum class RouterKind { softmax, sigmoid };

struct RouterStyle {
  RouterKind kind = RouterKind::softmax;
  bool renormalised = false;
  double eps = 0, scale = 1;
};

// logits: a column for each expert. bias: one row, or empty.
template <class A>
struct RouterInput {
  Matrix<const A> logits, bias;
  RouterStyle style;
};

// Some of the arithmetic of a row.
template <class A>
class RouterRow {
 public:
  STREAMBP_INLINE RouterRow(const RouterInput<A>& in, Index row)
      : x_(in.logits.row(row)), bias_(in.bias ? in.bias.data : nullptr), experts_(in.logits.cols), style_(in.style) {
    for (Index e = 0; e < experts_; ++e) largest_ = x_[e] > largest_ ? x_[e] : largest_;
  }

  // Writes the numbers of the experts, in ascending order.
  STREAMBP_INLINE void choose(std::int32_t* chosen, Index count) const {
    for (Index j = 0; j < count; ++j) {
      Index best = -1;
      for (Index e = 0; e < experts_; ++e)
        if ((j == 0 || comes_after(e, chosen[j - 1])) && (best < 0 || score(e) > score(best))) best = e;
      chosen[j] = static_cast<std::int32_t>(best < 0 ? j : best);  // of NaN, any expert
    }
    for (Index j = 1; j < count; ++j)
      for (Index i = j; i > 0 && chosen[i] < chosen[i - 1]; --i) {
        const std::int32_t lower = chosen[i];
        chosen[i] = chosen[i - 1], chosen[i - 1] = lower;
      }
  }
  // What the weights of the chosen experts are divided by.
  STREAMBP_INLINE A divisor(const std::int32_t* chosen, Index count) const {
    if (sigmoid_only()) return 1;
    A sum = static_cast<A>(style_.renormalised ? style_.eps : 0);
    for (Index j = 0; j < (style_.renormalised ? count : experts_); ++j)
      sum += value(style_.renormalised ? chosen[j] : j);
    return sum;
  }
  // p, for a softmax times a constant
  STREAMBP_INLINE A value(Index expert) const {
    return is_sigmoid() ? sigmoid(x_[expert]) : exponential(x_[expert] - largest_);
  }
  // dx of an expert with weight u. `du`: of a chosen one.
  STREAMBP_INLINE A gradient(Index expert, A u, A du, A t) const {
    const A dx = u * (du - (sigmoid_only() ? 0 : t));
    return is_sigmoid() ? dx * (1 - sigmoid(x_[expert])) : dx;
  }
  STREAMBP_INLINE bool reaches_all() const { return !is_sigmoid() && !style_.renormalised; }

 private:
  STREAMBP_INLINE bool is_sigmoid() const { return style_.kind == RouterKind::sigmoid; }
  STREAMBP_INLINE bool sigmoid_only() const { return is_sigmoid() && !style_.renormalised; }
  STREAMBP_INLINE A score(Index e) const { return is_sigmoid() ? sigmoid(x_[e]) + (bias_ ? bias_[e] : A(0)) : x_[e]; }
  STREAMBP_INLINE bool comes_after(Index e, Index last) const {
    const A mine = score(e), its = score(last);
    return mine < its || (mine == its && e > last);
  }

  const A *x_, *bias_;
  Index experts_;
  RouterStyle style_;
  A largest_ = static_cast<A>(-INFINITY);
};

template <class A>
struct RouteRow {
  RouterInput<A> in;
  Matrix<std::int32_t> chosen;
  Matrix<A> weights;

  STREAMBP_INLINE void operator()(Index i) const {
    const RouterRow<A> row(in, i);
    std::int32_t* experts = chosen.row(i);
    row.choose(experts, chosen.cols);
    const A factor = static_cast<A>(in.style.scale) / row.divisor(experts, chosen.cols);
    for (Index j = 0; j < chosen.cols; ++j) weights(i, j) = factor * row.value(experts[j]);
  }
};

template <class A>
struct RouteRowBackward {
  RouterInput<A> in;
  Matrix<A> dlogits;
  Matrix<const A> dweights;
  Matrix<const std::int32_t> chosen;

  STREAMBP_INLINE void operator()(Index i) const {
    const RouterRow<A> row(in, i);
    const std::int32_t* experts = chosen.row(i);
    const A factor = 1 / row.divisor(experts, chosen.cols), scale = static_cast<A>(in.style.scale);
    A t = 0;
    for (Index j = 0; j < chosen.cols; ++j) t += factor * row.value(experts[j]) * (scale * dweights(i, j));
    for (Index e = 0, j = 0; e < dlogits.cols; ++e) {
      const bool is_chosen = j < chosen.cols && experts[j] == e;
      const A du = is_chosen ? scale * dweights(i, j++) : A(0);
      dlogits(i, e) = is_chosen || row.reaches_all() ? row.gradient(e, factor * row.value(e), du, t) : A(0);
    }
  }
};

// Chooses as many experts as `chosen` has columns.
template <class Device, class A>
void route(Device& dev, Matrix<std::int32_t> chosen, Matrix<A> weights,
           const std::type_identity_t<RouterInput<A>>& in) {
  require_shape("route", "weights", weights, in.logits.rows, chosen.cols);
  require(chosen.cols <= in.logits.cols, "route: ", chosen.cols, " of ", in.logits.cols, " experts cannot be chosen");
  auto op = dev.operation("route", 2.0 * in.logits.size() * chosen.cols, sizeof(A) * in.logits.size());
  if constexpr (Device::computes) compute_rows(dev, chosen.rows, RouteRow<A>{in, chosen, weights});
}

// dlogits may not be in the memory of the logits.
template <class Device, class A>
void route_backward(Device& dev, Matrix<A> dlogits, Matrix<const std::int32_t> chosen, Input<A> dweights,
                    const std::type_identity_t<RouterInput<A>>& in) {
  require_shape("route backward", "dlogits", dlogits, in.logits.rows, in.logits.cols);
  require_shape("route backward", "dweights", dweights, chosen.rows, chosen.cols);
  auto op = dev.operation("route backward", 8.0 * in.logits.size(), 2.0 * sizeof(A) * in.logits.size());
  if constexpr (Device::computes) compute_rows(dev, chosen.rows, RouteRowBackward<A>{in, dlogits, dweights, chosen});
}

}  // namespace streambp
