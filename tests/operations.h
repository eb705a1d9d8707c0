// Shared by the tests of operations: a device, and checks of values and gradients.
#pragma once

#include <functional>

#include "tests/support.cuh"

namespace streambp {

using M = Matrix<double>;
using Loss = std::function<double()>;

inline Cpu& device() {
  static Cpu dev(std::size_t{1} << 28);
  return dev;
}

// Σ a * b
inline double dot(M a, M b) {
  double sum = 0;
  for (Index i = 0; i < a.rows; ++i) {
    for (Index j = 0; j < a.cols; ++j) sum += a(i, j) * b(i, j);
  }
  return sum;
}

// dx must be the gradient of the loss with respect to x. Checks up to 60 entries, spread over x.
inline void expect_gradient(const char* what, M x, M dx, const Loss& loss) {
  const Index stride = std::max<Index>(1, x.size() / 60);
  double scale = 1e-3;
  for (Index i = 0; i < dx.size(); ++i) scale = std::max(scale, std::abs(dx.data[i]));
  for (Index i = 0; i < x.size(); i += stride) {
    const double h = 1e-5, start = x.data[i];
    x.data[i] = start + h;
    const double above = loss();
    x.data[i] = start - h;
    const double below = loss();
    x.data[i] = start;
    EXPECT_NEAR(dx.data[i], (above - below) / (2 * h), 2e-7 * scale) << what << ", entry " << i;
  }
}

inline void expect_near(M a, const std::function<double(Index, Index)>& truth, double tolerance = 1e-12) {
  for (Index i = 0; i < a.rows; ++i) {
    for (Index j = 0; j < a.cols; ++j)
      ASSERT_NEAR(a(i, j), truth(i, j), tolerance * (1 + std::abs(truth(i, j)))) << i << ", " << j;
  }
}

inline Owned<double> zeros(Index rows, Index cols) { return {rows, cols, 0, 0}; }

inline Matrix<std::int32_t> integers(std::vector<std::int32_t>& v) {
  return {v.data(), 1, static_cast<Index>(v.size())};
}

}  // namespace streambp
