// The gated delta rule of the oracle, row by row, and the functions of its inputs.
#pragma once

#include "referee/oracle_operations.h"

namespace streambp::oracle {

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
inline Array sigmoid(Tape& tape, Array x) {
  return map(
      tape, x, [](double x) { return sigmoid(x); }, [](double x) { return sigmoid(x) * sigmoid(-x); });
}

inline Array exponential(Tape& tape, Array x) {
  const auto e = [](double x) { return std::exp(x); };
  return map(tape, x, e, e);
}

// log(1 + exp x), without overflow
inline Array softplus(Tape& tape, Array x) {
  return map(
      tape, x, [](double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); },
      [](double x) { return sigmoid(x); });
}

// x / sqrt(Σ x² + ε), for each row
inline Array unit(Tape& tape, Array x, double epsilon) {
  const Array squares = product(tape, multiply(tape, x, x), tape.constant(x.cols, 1, 1));
  const Array r = map(
      tape, squares, [=](double s) { return 1 / std::sqrt(s + epsilon); },
      [=](double s) { return -std::pow(s + epsilon, -1.5) / 2; });
  return multiply(tape, x, {r.data, x.rows, x.cols, 1, 0});
}

// A value head. S, its state (keys x values), is zero before a document's first row. For each row:
//   S' = e^g S        u = v - S'ᵀ k        S = S' + β k uᵀ        o = Sᵀ q
// Backward, from the last row to the first, where dS comes from later rows:
//   dS += q doᵀ        dq += S do        dk += β dS u        dβ += u · dSᵀk        du = β dSᵀk        dv += du
//   dS' = dS - k duᵀ        dk -= S' du        dg += Σ S' * dS'        dS of the row before = e^g dS'
struct DeltaRule {
  Array q, k, v, beta, g, o;
  Array u = {}, states = {};      // state(t) is S before row t
  std::vector<double> kept = {};  // what a row keeps of the state: e^g, or 0 at a document's first row

  Array state(Index t) const { return {&states(t * q.cols, 0), q.cols, v.cols, v.cols, 1}; }

  void forward(Index t, const Wrong& wrong) const {
    const Array before = state(t), after = state(t + 1);
    for (Index j = 0; j < v.cols; ++j) {
      double read = 0;
      for (Index i = 0; i < k.cols; ++i) read += kept[t] * before(i, j).value * k(t, i).value;
      u(t, j).value = v(t, j).value - read;
      for (Index i = 0; i < k.cols; ++i) {
        double& s = after(i, j).value;
        s = kept[t] * before(i, j).value + beta(t, 0).value * k(t, i).value * u(t, j).value;
        if (wrong.rounds_state) s = BFloat16(static_cast<float>(s));
        o(t, j).value += s * q(t, i).value;
      }
    }
  }

  void backward(Index t) const {
    const Array before = state(t), after = state(t + 1);
    for (Index j = 0; j < v.cols; ++j) {
      const double written = beta(t, 0).value * u(t, j).value;
      double dwritten = 0;
      for (Index i = 0; i < k.cols; ++i) {
        q(t, i).grad += after(i, j).value * o(t, j).grad;
        after(i, j).grad += q(t, i).value * o(t, j).grad;
        k(t, i).grad += after(i, j).grad * written;
        dwritten += after(i, j).grad * k(t, i).value;
      }
      const double du = beta(t, 0).value * dwritten;
      beta(t, 0).grad += dwritten * u(t, j).value;
      v(t, j).grad += du;
      for (Index i = 0; i < k.cols; ++i) {
        const double decayed = kept[t] * before(i, j).value, ddecayed = after(i, j).grad - k(t, i).value * du;
        k(t, i).grad -= decayed * du;
        g(t, 0).grad += decayed * ddecayed;
        before(i, j).grad += kept[t] * ddecayed;
      }
    }
  }
};

// Writes the head's o, which is zero before.
inline void delta_rule(Tape& tape, const TokenBatch& batch, DeltaRule head) {
  const Wrong& wrong = tape.wrong;
  const Index rows = head.q.rows;
  head.u = tape.zeros(rows, head.v.cols), head.states = tape.zeros((rows + 1) * head.k.cols, head.v.cols);
  for (Index t = 0; t < rows; ++t) {
    const bool begins = t == batch.key_begin[t] && !wrong.state_leaks,
               lost = wrong.what == "state-reset" && t % wrong.chunk == 0;
    head.kept.push_back(begins || lost ? 0 : std::exp(head.g(t, 0).value));
    head.forward(t, wrong);
  }
  tape.on_the_way_back([=] {
    for (Index t = rows; t-- > 0;) head.backward(t);
  });
}

}  // namespace streambp::oracle
