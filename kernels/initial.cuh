// Random initial values of a tensor. Element n depends on the seed and n only, and has the same bits on every device.
//
//   normal     mean + sigma z, with z standard normal; only the mean if sigma is 0
//   uniform    (2 u - 1) / divisor, with u uniform in (0, 1), if there is a divisor
//   log        log(u'), with u' uniform between lowest and highest, if there are these
#pragma once

#include <vector>

#include "kernels/base/device.cuh"
#include "kernels/base/random.h"
#ifdef STREAMBP_CUDA
#include "kernels/base/packs.cuh"
#endif

namespace streambp {

struct InitialValues {
  Random random;
  double mean = 0, sigma = 0, divisor = 0, lowest = 0, highest = 0;
  std::uint64_t first = 0;  // where the shard of this process begins

  // Rounded to float32 for every type, so a float64 model has the same weights as a float32 model.
  template <class Number = float>
  constexpr Number at(Index i) const {
    const std::uint64_t n = first + static_cast<std::uint64_t>(i);
    if (highest > 0) return static_cast<Number>(logarithm(lowest + (highest - lowest) * random.uniform(n)));
    if (divisor != 0) return static_cast<Number>((2 * random.uniform(n) - 1) / divisor);
    return static_cast<Number>(sigma == 0 ? mean : mean + sigma * random.normal(n));
  }
};

// The first `size` of them, on the host.
template <class T>
std::vector<T> on_host(const InitialValues& values, Index size) {
  std::vector<T> numbers(static_cast<std::size_t>(size));
#pragma omp parallel for
  for (Index i = 0; i < size; ++i) numbers[static_cast<std::size_t>(i)] = static_cast<T>(values.at(i));
  return numbers;
}

// m = the values
template <class Device, class T>
void initialise(Device& dev, Matrix<T> m, const InitialValues& values) {
  if constexpr (Device::computes) compute_initial(dev, m, values);
}
template <class Device, class T>
void initialise(Device& dev, FarMatrix<T> m, const InitialValues& values) {
  if constexpr (Device::computes) dev.upload(m, on_host<T>(values, m.size()).data());
}

template <class T>
void compute_initial(Cpu&, Matrix<T> m, const InitialValues& values) {
#pragma omp parallel for
  for (Index i = 0; i < m.size(); ++i) m.data[i] = static_cast<T>(values.at(i));
}

#ifdef STREAMBP_CUDA

// A billion numbers take the host half a minute, and a GPU some milliseconds.
template <class T>
void compute_initial(Cuda& dev, Matrix<T> m, const InitialValues& values) {
  if (m.empty()) return;  // the shard of a rank may have no rows
  const Matrix<T> all = m.reshape(m.size());
  auto f = [=] __device__(auto n, Index, Index j) {
    cuda::Floats<n()> numbers;
    for (int k = 0; k < n(); ++k) numbers.x[k] = values.at(j + k);
    cuda::store(all.data + j, numbers);
  };
  cuda::for_each_pack(dev, 1, all.cols, f, all);
}

#endif

}  // namespace streambp
