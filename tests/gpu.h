// Shared by the tests of the Cuda device, which run on a GPU and emulated on the CPU.
#pragma once

#include "tests/support.cuh"

namespace streambp {

#ifdef CUDA_ON_CPU
constexpr bool kEmulated = true;
#else
constexpr bool kEmulated = false;
#endif

// Sizes for a GPU, for the emulation (and compute-sanitizer), and for the ten times slower emulation under
// AddressSanitizer.
template <class T>
T sized(T on_gpu, T emulated, T sanitized) {
  if (kSanitized) return sanitized;
  return kEmulated || std::getenv("STREAMBP_SMALL_TESTS") ? emulated : on_gpu;
}

// Skips tests visibly without a GPU.
template <class Fixture>
class OnGpu : public Fixture {
 protected:
  void SetUp() override {
    Fixture::SetUp();
    const std::string reason = cuda::unusable();
    if (!reason.empty()) GTEST_SKIP() << "no GPU: " << reason;
  }
};
using GpuTest = OnGpu<testing::Test>;

// Gives a variable another value in a scope.
template <class T>
class Changed {
 public:
  Changed(T& variable, T value) : variable_(variable), before_(std::exchange(variable, value)) {}
  ~Changed() { variable_ = before_; }
  Changed(const Changed&) = delete;

 private:
  T& variable_;
  const T before_;
};

// Runs f once on a GPU; emulated, once per order of threads, since a missing barrier shows in some order.
// Sanitizers look for wrong addresses, which do not depend on the order.
template <class F>
void in_every_order(F&& f) {
  if (kSanitized) return f();
#ifdef CUDA_ON_CPU
  for (const auto schedule :
       {cuda_on_cpu::Schedule::forward, cuda_on_cpu::Schedule::backward, cuda_on_cpu::Schedule::shuffled}) {
    cuda_on_cpu::schedule = schedule;
    SCOPED_TRACE("order of threads " + std::to_string(static_cast<int>(schedule)));
    f();
  }
  cuda_on_cpu::schedule = cuda_on_cpu::Schedule::forward;
#else
  f();
#endif
}

template <class T>
constexpr double kRounding = std::is_same_v<T, BFloat16> ? 1e-2 : 3e-6;

// The same numbers in double on the host and in T on a device.
template <class T>
struct Twin {
  Owned<double> host;
  Matrix<T> gpu;

  template <class Device>
  Twin(Device& dev, Index rows, Index cols, std::uint64_t seed, double spread = 1, double mean = 0)
      : host(rows, cols, seed, spread, mean), gpu(allocate<T>(dev, rows, cols, Kind::chunk)) {
    for (double& x : *host.storage) x = static_cast<double>(static_cast<T>(static_cast<float>(x)));
    dev.upload(gpu, std::vector<T>(host.storage->begin(), host.storage->end()).data());
  }
};

// max |a - b| / max |b|; infinite if any value is not finite
template <class Device, class T>
double error_of(Device& dev, const Twin<T>& twin) {
  double error = 0, largest = 0;
  const std::vector<T> values = to_host(dev, twin.gpu);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double truth = (*twin.host.storage)[i], difference = std::abs(static_cast<double>(values[i]) - truth);
    error = std::isfinite(difference) ? std::max(error, difference) : INFINITY;
    largest = std::max(largest, std::abs(truth));
  }
  return largest > 0 ? error / largest : error;
}

// Integers on both.
struct TwinIntegers {
  std::vector<std::int32_t> values;
  Matrix<const std::int32_t> host, gpu;

  template <class Device>
  TwinIntegers(Device& dev, std::vector<std::int32_t> v)
      : values(std::move(v)), host(values.data(), 1, static_cast<Index>(values.size())) {
    const auto matrix = allocate<std::int32_t>(dev, 1, host.cols, Kind::stream);
    dev.upload(matrix, values.data());
    gpu = matrix;
  }
  TwinIntegers(const TwinIntegers&) = delete;
};

// What an argument is on each device: its matrix, or itself.
template <class T>
Matrix<double> on_host(const Twin<T>& twin) {
  return twin.host.m;
}
template <class T>
Matrix<T> on_gpu(const Twin<T>& twin) {
  return twin.gpu;
}
inline auto on_host(const TwinIntegers& twin) { return twin.host; }
inline auto on_gpu(const TwinIntegers& twin) { return twin.gpu; }
inline auto on_host(const auto& argument) { return argument; }
inline auto on_gpu(const auto& argument) { return argument; }

// Clang 14 does not deduce the template argument of an aggregate.
template <class T>
NormWeights<T> norm_weights(Matrix<T> weight, Matrix<T> bias) {
  return {weight, bias};
}

}  // namespace streambp
