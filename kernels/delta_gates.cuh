// The gates of a delta rule, for each value head: how much a row writes, and the logarithm of how much the state decays before.
//
//   β = scale σ(b)       db = dβ β (1 - σ(b))     with a scale of 2, a state's transition can have negative eigenvalues
//   g = -A softplus(x)   with A = exp(A_log) and x = a + dt:   da = -dg A σ(x),   dA_log = Σ_rows dg g,   ddt = Σ_rows da
#pragma once

#include "kernels/elementwise.cuh"
#include "kernels/short_convolution.cuh"

namespace streambp {

// a, b: a column for each head. a_log, dt: one row.
template <class T>
struct DeltaGates {
  using A = Accumulator<T>;
  Matrix<const T> a, b;
  Matrix<const A> a_log;
  Matrix<const T> dt;
  A beta_scale = 1;

  STREAMBP_INLINE A share(Index i, Index h) const { return sigmoid(A(b(i, h))); }
  STREAMBP_INLINE A beta(Index i, Index h) const { return beta_scale * share(i, h); }
  STREAMBP_INLINE double rate(Index h) const { return exponential(double(a_log(0, h))); }
  STREAMBP_INLINE double input(Index i, Index h) const { return double(A(a(i, h))) + double(A(dt(0, h))); }
  STREAMBP_INLINE double decay(Index i, Index h) const { return -rate(h) * softplus(input(i, h)); }
};

// Element i of value head h
template <class T>
struct DeltaGatesForward {
  using A = Accumulator<T>;
  DeltaGates<T> in;
  Matrix<T> beta;
  Matrix<A> decay;
  STREAMBP_INLINE void operator()(Index i, Index h) const {
    beta(i, h) = in.beta(i, h), decay(i, h) = static_cast<A>(in.decay(i, h));
  }
};
// dbeta and ddecay become the terms of ddt and of da_log.
template <class T>
struct DeltaGatesBackward {
  using A = Accumulator<T>;
  DeltaGates<T> in;
  Matrix<T> da, db;
  Matrix<A> dbeta, ddecay;
  STREAMBP_INLINE void operator()(Index i, Index h) const {
    const A beta = in.beta(i, h), rest = 1 - in.share(i, h);
    const double dg = static_cast<double>(ddecay(i, h)), decay = in.decay(i, h);
    const A dx = static_cast<A>(-in.rate(h) * sigmoid(in.input(i, h)) * dg);
    db(i, h) = dbeta(i, h) * beta * rest, da(i, h) = dx;  // in the memory of b and a
    dbeta(i, h) = dx, ddecay(i, h) = static_cast<A>(decay * dg);
  }
};

template <class Device, class T>
void delta_gates(Device& dev, Matrix<T> beta, Matrix<Accumulator<T>> decay,
                 const std::type_identity_t<DeltaGates<T>>& in) {
  require_shape("delta gates", "a", in.a, beta.rows, beta.cols);
  require_shape("delta gates", "b", in.b, beta.rows, beta.cols);
  auto op = dev.operation("delta gates", 60.0 * beta.size(), 5.0 * sizeof(T) * beta.size());
  if constexpr (Device::computes) compute_elements(dev, beta.rows, beta.cols, DeltaGatesForward<T>{in, beta, decay});
}

// Overwrites dbeta and ddecay. Adds to da_log and ddt, in one or several lanes; empty ones are frozen.
template <class Device, class T>
void delta_gates_backward(Device& dev, Matrix<T> da, Matrix<T> db, Matrix<Accumulator<T>> da_log,
                          Matrix<Accumulator<T>> ddt, Matrix<Accumulator<T>> dbeta, Matrix<Accumulator<T>> ddecay,
                          const std::type_identity_t<DeltaGates<T>>& in) {
  {
    auto op = dev.operation("delta gates backward", 90.0 * da.size(), 10.0 * sizeof(T) * da.size());
    if constexpr (Device::computes)
      compute_elements(dev, da.rows, da.cols, DeltaGatesBackward<T>{in, da, db, dbeta, ddecay});
  }
  if (ddt) add_column_sums(dev, ddt, dbeta);
  if (da_log) add_column_sums(dev, da_log, ddecay);
}

}  // namespace streambp
