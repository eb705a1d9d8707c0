// Micro-benchmarks of the machine's peak speed, the baseline for the program's own speed.
#pragma once

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "kernels/base/random.h"
#include "kernels/elementwise.cuh"
#include "kernels/matmul.cuh"
#include "parallel/exchange.h"

namespace streambp {

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

// Bytes per second to or from far memory, whichever is slower. The best of a few runs.
template <class Device>
double far_rate(const std::filesystem::path& directory) {
  constexpr Index rows = 16, cols = Index{1} << 18;  // of a megabyte
  Capacity capacity(rows * cols * sizeof(float), rows * cols * sizeof(float));
  capacity.directory = directory;
  Device dev(capacity);
  const auto near = allocate<float>(dev, rows, cols, Kind::chunk);
  zero(dev, near);
  const auto far = allocate_far<float>(dev, rows, cols, Kind::chunk);
  auto rate = [&](auto&& copy) {
    double best = 0;
    for (int i = 0; i < 3; ++i) {
      dev.synchronize();
      const auto start = std::chrono::steady_clock::now();
      copy().wait();
      dev.synchronize();
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      best = std::max(best, static_cast<double>(far.bytes()) / seconds);
    }
    return best;
  };
  const double put = rate([&] { return dev.put(far, near); });
  return std::min(put, rate([&] { return dev.get(near, far); }));
}

// Bytes that a rank sends per second while all ranks of a group send to all others, in memory that all have left.
// The best of a few runs.
template <class Device>
double link_rate(Device& dev, const Group& group) {
  if (group.size == 1) return 0;
  auto scope = dev.scope();
  auto left = static_cast<Index>(dev.arena.capacity() - dev.arena.used()) / static_cast<Index>(sizeof(float));
  for (const auto& of_rank : gather_on_host(group, std::vector<Index>{left})) left = std::min(left, of_rank[0]);
  const auto m = allocate<float>(dev, group.size, std::min(left / (2 * group.size), Index{1} << 22), Kind::chunk);
  zero(dev, m);
  const Transfers transfers = shared_rows<float>(group, {m});
  double best = 0;
  for (int i = 0; i < 6; ++i) {
    dev.synchronize();
    const auto start = std::chrono::steady_clock::now();
    group.transport->start(transfers), group.transport->finish();
    dev.synchronize();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, bytes_sent(transfers) / seconds);
  }
  return best;
}

namespace cpu {

// Random numbers in -1 .. 1. On zeros, a processor can be faster than on real data.
inline Matrix<float> noise(Cpu& dev, Index rows, Index cols, std::uint64_t seed) {
  const auto m = allocate<float>(dev, rows, cols, Kind::chunk);
  const Random random(seed);
#pragma omp parallel for
  for (Index i = 0; i < m.size(); ++i) {
    m.data[i] = static_cast<float>(2 * random.uniform(static_cast<std::uint64_t>(i)) - 1);
  }
  return m;
}

// The shortest of a few products of n x n matrices, in seconds, because other processes may be running.
inline double product_seconds(Index n) {
  Cpu dev(3 * static_cast<std::size_t>(n * n) * sizeof(float) + 4096);
  const auto x = noise(dev, n, n, 1), w = noise(dev, n, n, 2), y = noise(dev, n, n, 3);
  double shortest = INFINITY;
  for (int i = 0; i < 6; ++i) {
    const auto start = std::chrono::steady_clock::now();
    matmul(dev, y, x, w);
    shortest = std::min(shortest, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return shortest;
}

// FLOP/s of a large product: one that takes 20 ms, so that slow machines need not wait.
inline double matmul_rate() {
  constexpr Index largest = 1536;
  for (Index n = largest / 4;; n *= 2) {
    const double seconds = product_seconds(n);
    if (seconds > 0.02 || n == largest) return 2.0 * static_cast<double>(n * n * n) / seconds;
  }
}

// Bytes per second when reading a large block of host memory. The best of a few runs.
inline double read_rate() {
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
}

}  // namespace cpu

}  // namespace streambp
