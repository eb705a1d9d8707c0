// Micro-benchmarks of the machine's peak speed, the baseline for the program's own speed.
#pragma once

#include <cmath>

#include "kernels/base/random.h"
#include "kernels/matmul.cuh"
#include "parallel/exchange.h"

namespace streambp {

// The shortest time of a few runs of f, in seconds: other processes may be running.
template <class Device, class F>
double shortest_seconds(Device& dev, int runs, F&& f) {
  double shortest = INFINITY;
  for (int i = 0; i < runs; ++i) {
    dev.synchronize();
    const Stopwatch watch;
    f();
    dev.synchronize();
    shortest = std::min(shortest, watch.seconds());
  }
  return shortest;
}

// Bytes read and written per second by a copy within device memory, larger than any cache.
template <class Device>
double copy_rate() {
  constexpr Index n = Index{1} << 26;
  Device dev(2 * n * sizeof(float));
  const auto from = allocate<float>(dev, 1, n, Kind::chunk), to = allocate<float>(dev, 1, n, Kind::chunk);
  zero(dev, from);
  return 2.0 * n * sizeof(float) / shortest_seconds(dev, 6, [&] { dev.copy(to, from); });
}

// Bytes per second to or from far memory, whichever is slower.
template <class Device>
double far_rate(const std::filesystem::path& directory) {
  constexpr Index rows = 16, cols = Index{1} << 18;  // of a megabyte
  Capacity capacity(rows * cols * sizeof(float), rows * cols * sizeof(float));
  capacity.directory = directory;
  Device dev(capacity);
  const auto near = allocate<float>(dev, rows, cols, Kind::chunk);
  zero(dev, near);
  const auto far = allocate_far<float>(dev, rows, cols, Kind::chunk);
  const double put = shortest_seconds(dev, 3, [&] { dev.put(far, near).wait(); });
  const double get = shortest_seconds(dev, 3, [&] { dev.get(near, far).wait(); });
  return static_cast<double>(far.bytes()) / std::max(put, get);
}

// Bytes that a rank sends per second while all ranks of a group send to all others, in memory that all have left.
template <class Device>
double link_rate(Device& dev, const Group& group) {
  if (group.size == 1) return 0;
  auto scope = dev.scope();
  auto left = static_cast<Index>(dev.arena.capacity() - dev.arena.used()) / static_cast<Index>(sizeof(float));
  for (const auto& of_rank : gather_on_host(group, std::vector<Index>{left})) left = std::min(left, of_rank[0]);
  const auto m = allocate<float>(dev, group.size, std::min(left / (2 * group.size), Index{1} << 22), Kind::chunk);
  zero(dev, m);
  const Transfers transfers = shared_rows(group, m);
  const auto send = [&] { group.transport->start(transfers), group.transport->finish(); };
  return bytes_sent(transfers) / shortest_seconds(dev, 6, send);
}

namespace cpu {

// Random numbers in -1 .. 1. On zeros, a processor can be faster than on real data.
template <class T>
Matrix<T> noise(Cpu& dev, Index rows, Index cols, std::uint64_t seed) {
  const auto m = allocate<T>(dev, rows, cols, Kind::chunk);
  const Random random(seed);
#pragma omp parallel for
  for (Index i = 0; i < m.size(); ++i) {
    m.data[i] = static_cast<float>(2 * random.uniform(static_cast<std::uint64_t>(i)) - 1);
  }
  return m;
}

// Of a product of n x n matrices.
template <class T>
double product_seconds(Index n) {
  Cpu dev(3 * static_cast<std::size_t>(n * n) * sizeof(T) + 4096);
  const auto x = noise<T>(dev, n, n, 1), w = noise<T>(dev, n, n, 2), y = noise<T>(dev, n, n, 3);
  return shortest_seconds(dev, 6, [&] { matmul(dev, y, x, w); });
}

// FLOP/s of a large product: one that takes 5 ms, so that slow machines need not wait.
template <class T>
double matmul_rate() {
  constexpr Index largest = 1536;
  for (Index n = largest / 4;; n *= 2) {
    const double seconds = product_seconds<T>(n);
    if (seconds > 0.005 || n == largest) return 2.0 * static_cast<double>(n * n * n) / seconds;
  }
}

// Bytes per second when reading a large block of host memory.
inline double read_rate() {
  constexpr Index n = Index{1} << 27, block = Index{1} << 16, streams = 8, lanes = 16;
  Cpu dev(n * sizeof(float));
  const auto m = allocate<float>(dev, n / block, block, Kind::chunk);
  for (Index i = 0; i < m.size(); ++i) m.data[i] = 1;
  double all = 0;
  const double seconds = shortest_seconds(dev, 6, [&] {
    double sum = 0;
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
    all += sum;
  });
  require(all > 0, "memory does not hold what was written");
  return static_cast<double>(n) * sizeof(float) / seconds;
}

}  // namespace cpu

}  // namespace streambp
