// The fixture of tests that run an operation on a device, in float32 and bfloat16, and on the CPU in float64.
#pragma once

#include "tests/gpu.h"

namespace streambp {

template <class Device, class Number>
struct On {
  using D = Device;
  using T = Number;
};

template <class Tested>
class OnBothDevices : public testing::Test {
 public:
  using D = typename Tested::D;
  using T = typename Tested::T;

  void SetUp() override {
    constexpr std::size_t room = std::size_t{1} << 28;
    host = std::make_unique<Cpu>(2 * room);
    if constexpr (D::kind == DeviceKind::cpu) {
      gpu = std::make_unique<D>(room);
    } else {
      if (const std::string reason = cuda::unusable(); !reason.empty()) GTEST_SKIP() << "no GPU: " << reason;
      gpu = std::make_unique<D>(room, kTile);
    }
  }
  Twin<T> random(Index rows, Index cols, double spread = 1, double mean = 0) {
    return {*gpu, rows, cols, ++seed, spread, mean};
  }
  Twin<float> wide(Index rows, Index cols, double spread = 1) { return {*gpu, rows, cols, ++seed, spread}; }
  template <class U>
  void expect_near(const char* what, const Twin<U>& twin, double tolerance = kRounding<T>) {
    EXPECT_LE(error_of(*gpu, twin), tolerance) << what;
  }
  // Calls f(device, arguments...) on both devices; a Twin is each device's matrix.
  template <class F, class... Arguments>
  void both(F&& f, const Arguments&... arguments) {
    f(*host, on_host(arguments)...);
    f(*gpu, on_gpu(arguments)...);
  }

  std::unique_ptr<Cpu> host;
  std::unique_ptr<D> gpu;  // the device under test
  std::uint64_t seed = 0;
};
#ifdef CUDA_ON_CPU  // without a GPU: sizes are small
using DeviceTypes = testing::Types<On<Cuda, float>, On<Cuda, BFloat16>, On<Cpu, float>, On<Cpu, BFloat16>>;
#else
using DeviceTypes = testing::Types<On<Cuda, float>, On<Cuda, BFloat16>>;
#endif
struct DeviceTypeNames {
  template <class Tested>
  static std::string GetName(int) {
    return std::string(Tested::D::kind == DeviceKind::cuda ? "cuda_" : "cpu_") +
           (sizeof(typename Tested::T) == 4 ? "float32" : "bfloat16");
  }
};

// A function template as an argument.
#define FUNCTION(name) [](auto& dev, const auto&... arguments) { return name(dev, arguments...); }

}  // namespace streambp
