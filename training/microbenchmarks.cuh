// Micro-benchmarks of the machine's peak speed, the baseline for the program's own speed.
#pragma once

#include <omp.h>

#include <chrono>

#include "kernels/base/random.cuh"
#include "kernels/elementwise.cuh"
#include "kernels/matmul.cuh"

namespace streambp {

// Random numbers in -1 .. 1. On zeros, a processor can be faster than on real data.
template <class Device, class T>
Matrix<T> noise(Device& dev, Index rows, Index cols, std::uint64_t seed) {
  const auto m = allocate<T>(dev, rows, cols, Kind::chunk);
  std::vector<T> values(static_cast<std::size_t>(m.size()));
  const Random random(seed);
#pragma omp parallel for
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<T>(static_cast<float>(2 * random.uniform(i) - 1));
  }
  dev.upload(m, values.data());
  return m;
}

// The sorted FLOP/s of a few products of n x n matrices; on a CPU also with the library's own threads.
template <class Device, class T>
std::vector<double> matmul_rates(Device& dev, Index n, int repeat) {
  auto scope = dev.scope();
  const auto x = noise<Device, T>(dev, n, n, 1), w = noise<Device, T>(dev, n, n, 2), y = noise<Device, T>(dev, n, n, 3);
  std::vector<double> rates;
  auto time = [&](auto&& f) {
    const auto start = std::chrono::steady_clock::now();
    f();
    dev.synchronize();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    rates.push_back(2.0 * static_cast<double>(n * n * n) / seconds);
  };
  for (int i = 0; i < repeat; ++i) {
    time([&] { matmul(dev, y, x, w); });
    if constexpr (std::is_same_v<Device, Cpu>) {
      if (openblas_set_num_threads) openblas_set_num_threads(omp_get_max_threads());
      time([&] { cpu::gemm<T>(1, x, cpu::Op::as_is, w, cpu::Op::transposed, 0, y); });
      if (openblas_set_num_threads) openblas_set_num_threads(1);
    }
  }
  std::sort(rates.begin(), rates.end());
  return rates;
}

// The machine's matmul rate. On a CPU: the best measurement, because other processes may be running. On a GPU: the
// median for the largest size that takes milliseconds.
template <class Device, class T>
double matmul_rate() {
  constexpr bool on_cpu = std::is_same_v<Device, Cpu>;
  const Index most = on_cpu ? 1536 : sizeof(T) == 2 ? 8192 : 4096;
  Device dev(static_cast<std::size_t>(3 * most * most) * sizeof(T) + 4096);
  if (on_cpu) return matmul_rates<Device, T>(dev, most, 4).back();
  Index n = 256;
  auto seconds = [&] { return 2.0 * static_cast<double>(n * n * n) / matmul_rates<Device, T>(dev, n, 2).back(); };
  while (n < most && seconds() < 2e-3) n *= 2;
  return matmul_rates<Device, T>(dev, n, 21)[10];
}

// Bytes read and written per second by a copy within device memory, larger than any cache. The best of a few runs.
template <class Device>
double copy_rate() {
  constexpr Index n = Index{1} << 26;
  Device dev(2 * n * sizeof(float));
  const auto from = allocate<float>(dev, 1, n, Kind::chunk), to = allocate<float>(dev, 1, n, Kind::chunk);
  zero(dev, from);
  double best = 0;
  for (int i = 0; i < 6; ++i) {
    dev.synchronize();
    const auto start = std::chrono::steady_clock::now();
    dev.copy(to, from);
    dev.synchronize();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, 2.0 * n * sizeof(float) / seconds);
  }
  return best;
}

// Bytes per second when reading a large block of memory; on a GPU, of a copy. The best of a few runs.
template <class Device>
double read_rate() {
  if constexpr (std::is_same_v<Device, Cpu>) {
    constexpr Index n = Index{1} << 27, block = Index{1} << 16, streams = 8, lanes = 16;
    Cpu dev(n * sizeof(float));
    const auto m = allocate<float>(dev, n / block, block, Kind::chunk);
    for (Index i = 0; i < m.size(); ++i) m.data[i] = 1;
    double best = 0, sum = 0;
    for (int i = 0; i < 6; ++i) {
      const auto start = std::chrono::steady_clock::now();
#pragma omp parallel for reduction(+ : sum)
      for (Index row = 0; row < m.rows; ++row) {
        float sums[streams][lanes] = {};  // several read streams are faster than one
        for (Index j = 0; j < block / streams; j += lanes) {
          for (Index stream = 0; stream < streams; ++stream) {
            const float* from = m.row(row) + stream * (block / streams) + j;
#pragma omp simd
            for (Index lane = 0; lane < lanes; ++lane) sums[stream][lane] += from[lane];
          }
        }
        for (const auto& stream : sums) sum += static_cast<double>(stream[0]);
      }
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      best = std::max(best, static_cast<double>(n) * sizeof(float) / seconds);
    }
    require(sum > 0, "memory does not hold what was written");
    return best;
  } else {
    return copy_rate<Device>();
  }
}

}  // namespace streambp
