// Where a command computes and in which types, and how fast the machine is at its best.
#pragma once

#include <chrono>

#include "commands/options.cuh"

namespace streambp {

// Where to compute, and in which types.
struct DeviceOptions {
  std::string device = "auto", dtype = "auto", gradient = "auto", optimizer = "adamw";

  // Commands differ in the types and optimizers that they know.
  void add_to(CLI::App& app, const std::vector<std::string>& types, const std::vector<std::string>& optimizers) {
    auto option = [&](const char* name, std::string& value, const std::vector<std::string>& choices, const char* help) {
      app.add_option(name, value, help)->check(CLI::IsMember(choices))->capture_default_str()->group("Device");
    };
    option("--device", device, {"auto", "cpu", "cuda"}, "cuda: the first GPU; auto: a GPU if one can be used");
    option("--dtype", dtype, types, "Of weights and activations; auto: bf16 on a GPU, else f32");
    if (optimizers.empty()) return;
    option("--grad-dtype", gradient, {"auto", "f32", "bf16"},
           "Of the gradient between micro-batches, where weights are bf16; auto: bf16");
    option("--optimizer", optimizer, optimizers,
           "adamw: float32 moments and master weights; adamw-bf16: bf16 moments, no master, rounding by chance");
  }

  bool gpu() const {
    if (device == "cpu" || dtype == "f64") {
      require(device != "cuda", "--dtype f64 is the CPU's; on a GPU use f32 or bf16");
      require(dtype != "bf16", "--dtype bf16 is the GPU's; on the CPU use f32");
      return false;
    }
#ifdef STREAMBP_CUDA
    const std::string reason = cuda::unusable();
#else
    const std::string reason = "this program was built without a CUDA compiler";
#endif
    require(reason.empty() || device == "auto", "--device cuda: no GPU can be used: ", reason, "; use --device cpu");
    require(reason.empty() || dtype != "bf16", "--dtype bf16 is the GPU's, and no GPU can be used: ", reason,
            "; use --dtype f32");
    return reason.empty();
  }

  StepSettings settings(const Config& config, Index micro_batches) const {
    StepSettings s{config};
    const bool on_gpu = gpu();
    s.dtype = dtype == "f64" ? DType::f64 : on_gpu && dtype != "f32" ? DType::bf16 : DType::f32;
    s.optimizer = optimizer == "none"    ? OptimizerKind::none
                  : optimizer == "adamw" ? OptimizerKind::adamw
                                         : OptimizerKind::adamw_pure;
    s.micro_batches = micro_batches;
    s.wide_gradient = gradient == "f32";
    s.tile = on_gpu ? kGpuTile : kTile;
    require(!on_gpu || config.head_dim <= 256, "heads of ", config.head_dim,
            " are wider than the 256 that a GPU attends with; use --device cpu");
    require(s.dtype == DType::bf16 || s.optimizer != OptimizerKind::adamw_pure,
            "--optimizer adamw-bf16 goes with --dtype bf16, on a GPU");
    require(s.dtype == DType::bf16 || gradient != "bf16", "--grad-dtype bf16 goes with --dtype bf16, on a GPU");
    return s;
  }
};

inline const char* name(DType type) {
  return type == DType::f32 ? "float32" : type == DType::f64 ? "float64" : "bfloat16";
}

// What a run may take on the device.
inline std::size_t free_memory(bool gpu) {
#ifdef STREAMBP_CUDA
  if (gpu) return cuda::free_memory();
#endif
  static_cast<void>(gpu);
  return available_memory();
}

// Calls f.operator()<Device, T, G, M>() with the device, and the types of weights, gradient and moments.
template <class F>
auto on_device(bool gpu, const StepSettings& settings, F&& f) {
#ifdef STREAMBP_CUDA
  if (gpu) {
    return with_types(settings, [&]<class T, class G, class M>() {
      if constexpr (!std::is_same_v<T, double>) return f.template operator()<Cuda, T, G, M>();
      fail("float64 is the CPU's");
    });
  }
#endif
  require(!gpu && settings.dtype == DType::f32, "the CPU computes in float32");
  return f.template operator()<Cpu, float, float, float>();
}

// Refuses a step that the device has no room for, with what would fit.
inline void require_room(const StepSettings& s, Mode mode, Index rows, Index chunk, std::size_t wanted,
                         std::size_t room) {
  if (wanted <= room) return;
  const std::string needs =
      format("this run needs %s, and %s are free", human_bytes(wanted).c_str(), human_bytes(room).c_str());
  const Index longest = longest_for_budget(s, mode, chunk, room), fitting = chunk_for_budget(s, rows, room);
  require(longest > 0, needs, "; use a smaller model, or one of the narrower --dtype and --optimizer");
  fail(needs, ": in ", name(mode), " mode there is room for ", longest, " tokens at a time",
       fitting > 0 ? format("; for these %ld use --mode stream --chunk %ld or less", rows, fitting) : "");
}

// Numbers in -1 .. 1, for measuring: with zeros a processor can be faster than it is.
template <class Device, class T>
Matrix<T> noise(Device& dev, Index rows, Index cols, std::uint64_t seed) {
  const auto m = dev.template allocate<T>(rows, cols, Kind::chunk);
  std::vector<T> values(static_cast<std::size_t>(m.size()));
  const Random random(seed);
#pragma omp parallel for
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<T>(static_cast<float>(2 * random.uniform(i) - 1));
  }
  dev.upload(m, values.data());
  return m;
}

// Rates, in FLOP/s, of a few products of n x n matrices; on a CPU also by the library's own threads.
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

// The rate at which the machine multiplies large matrices: the best of a CPU, which others use as well; the median of a
// GPU, in the largest of a few sizes that takes no more than milliseconds.
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

// Bytes read and written a second by a copy within the device's memory, of matrices larger than any cache; the best of a
// few.
template <class Device>
double copy_rate() {
  constexpr Index n = Index{1} << 26;
  Device dev(2 * n * sizeof(float));
  const auto from = dev.template allocate<float>(1, n, Kind::chunk),
             to = dev.template allocate<float>(1, n, Kind::chunk);
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

// Bytes a second at which all of a large memory can be read; on a GPU those of a copy. The best of a few.
template <class Device>
double read_rate() {
  if constexpr (std::is_same_v<Device, Cpu>) {
    constexpr Index n = Index{1} << 27, block = Index{1} << 16, streams = 8, lanes = 16;
    Cpu dev(n * sizeof(float));
    const auto m = dev.allocate<float>(n / block, block, Kind::chunk);
    for (Index i = 0; i < m.size(); ++i) m.data[i] = 1;
    double best = 0, sum = 0;
    for (int i = 0; i < 6; ++i) {
      const auto start = std::chrono::steady_clock::now();
#pragma omp parallel for reduction(+ : sum)
      for (Index row = 0; row < m.rows; ++row) {
        float sums[streams][lanes] = {};  // a processor reads several places at once faster than one after the other
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

inline std::string device_name(bool gpu) {
#ifdef STREAMBP_CUDA
  if (gpu) return cuda::name();
#endif
  static_cast<void>(gpu);
  return format("%d threads", omp_get_max_threads());
}

}  // namespace streambp
