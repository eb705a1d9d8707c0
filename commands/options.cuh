// What the commands share: options that describe a model, sizes as people write them, and tables as people read them.
#pragma once

#include <omp.h>
#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "../data/config.cuh"
#include "../plan.cuh"

namespace streambp {

template <class... Values>
std::string format(const char* pattern, Values... values) {
  std::string text(static_cast<std::size_t>(std::snprintf(nullptr, 0, pattern, values...)), '\0');
  std::snprintf(text.data(), text.size() + 1, pattern, values...);
  return text;
}

inline std::string human_bytes(std::size_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  return unit == 0 ? format("%zu B", bytes) : format("%.2f %s", value, units[unit]);
}

inline std::string human_count(double value) {
  const char* units[] = {"", "k", "M", "G", "T", "P", "E"};
  int unit = 0;
  for (; std::abs(value) >= 1000 && unit < 6; ++unit) value /= 1000;
  return format(unit ? "%.2f%s" : "%.0f%s", value, units[unit]);
}

// "80GiB", "80G" and "80g" are 80 * 2^30 bytes, "80GB" is 80 * 10^9; a bare number is bytes.
inline std::size_t parse_bytes(const std::string& text) {
  std::size_t end = 0;
  double value = -1;
  try {
    value = std::stod(text, &end);
  } catch (const std::exception&) {
  }
  std::string unit = text.substr(end);
  for (char& c : unit) c = static_cast<char>(std::tolower(c));
  const std::size_t power = unit.empty() ? 0 : std::string("bkmgt").find(unit[0]);
  const bool decimal = unit.size() == 2 && unit[1] == 'b';
  const bool known = power != std::string::npos && (unit.size() <= 1 || decimal || unit.substr(1) == "ib");
  require(value > 0 && known, "\"", text, "\" is not an amount of memory; write it like 24GiB, 512MiB or 80GB");
  const double bytes = value * std::pow(decimal ? 1000.0 : 1024.0, static_cast<double>(power));
  require(bytes < 0x1p60, "\"", text, "\" is more memory than any machine has");
  return static_cast<std::size_t>(bytes);
}

// A table with a header; columns are as wide as their widest cell, and numbers (all but the first column) stand right.
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> header) : rows{std::move(header)} {}
  void add(std::vector<std::string> row) { rows.push_back(std::move(row)); }
  void print() const {
    std::vector<std::size_t> width(rows[0].size());
    for (const auto& row : rows) {
      for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
    }
    for (const auto& row : rows) {
      std::string line;
      for (std::size_t i = 0; i < row.size(); ++i) {
        const std::string space(width[i] - row[i].size(), ' ');
        line += i == 0 ? row[i] + space : "  " + space + row[i];
      }
      std::printf("%s\n", line.substr(0, line.find_last_not_of(' ') + 1).c_str());
    }
  }

 private:
  std::vector<std::vector<std::string>> rows;
};

// A model given by name, by the path of a config.json or its directory, or by family and sizes.
struct ModelOptions {
  std::string model, family = "llama";
  Index vocab = 256, hidden = 128, layers = 4, heads = 4, kv_heads = 0, head_dim = 0, mlp = 0, window = 0;
  std::string tied = "auto";
  std::vector<CLI::Option*> sizes;

  void add_to(CLI::App& app, const std::string& model_option, bool with_vocab) {
    const std::string group = "Model";
    const CLI::Validator size = CLI::Range(1, 1 << 24);
    if (!model_option.empty()) {
      std::string names;
      for (const auto& [known, config] : known_models()) names += (names.empty() ? "" : ", ") + known;
      app.add_option(model_option, model, "A config.json, a model directory, or one of: " + names)->group(group);
    }
    sizes = {
        app.add_option("--family", family, "gpt2, llama, mistral, qwen2 or qwen3")
            ->check(CLI::IsMember({"gpt2", "llama", "mistral", "qwen2", "qwen3"})),
        app.add_option("--hidden", hidden, "Width of the residual stream")->check(size),
        app.add_option("--layers", layers, "Number of layers")->check(size),
        app.add_option("--heads", heads, "Query heads")->check(size),
        app.add_option("--kv-heads", kv_heads,
                       "Key/value heads, a divisor of --heads (default: half of them; gpt2: all)")
            ->check(size),
        app.add_option("--head-dim", head_dim, "Width of a head (default: hidden / heads)")->check(size),
        app.add_option("--mlp", mlp, "Width of the MLP (default: 8/3 of hidden; gpt2: 4 times)")->check(size),
        app.add_option("--window", window, "Sliding attention window (default: mistral 256, others none)")
            ->check(CLI::Range(0, 1 << 24)),
        app.add_option("--tied", tied, "Share the head's weight with the embedding: yes, no, or auto (gpt2, qwen: yes)")
            ->check(CLI::IsMember({"auto", "yes", "no"}))};
    if (with_vocab) sizes.push_back(app.add_option("--vocab", vocab, "Vocabulary")->check(size));
    for (CLI::Option* option : sizes) option->group(group)->capture_default_str();
    for (const char* derived : {"--kv-heads", "--head-dim", "--mlp", "--window"})
      app.get_option(derived)->default_str("");
  }

  bool sizes_given() const {
    return std::any_of(sizes.begin(), sizes.end(), [](const CLI::Option* option) { return option->count() > 0; });
  }

  // max_length: what learned positions must reach.
  Config config(Index max_length) const {
    if (!model.empty()) {
      for (const CLI::Option* option : sizes) {
        require(option->count() == 0, option->get_name(), " belongs to a model given by --family and sizes, and \"",
                model, "\" is given by name; leave out one of them");
      }
      const auto known = known_models().find(model);
      if (known != known_models().end()) return known->second;
      require(std::filesystem::exists(model), "\"", model,
              "\" is neither the name of a known model (see --help) nor a config.json or model directory");
      return read_config(model);
    }
    const auto families = {"gpt2", "llama", "mistral", "qwen2", "qwen3"};
    require(std::find(families.begin(), families.end(), family) != families.end(), "there is no family \"", family,
            "\"");
    const bool gpt2 = family == "gpt2", qwen = family == "qwen2" || family == "qwen3";
    require(head_dim > 0 || hidden % heads == 0, "--hidden ", hidden, " is not divisible by --heads ", heads,
            "; choose sizes that divide, or give --head-dim");
    require(!gpt2 || kv_heads == 0 || kv_heads == heads,
            "gpt2 has as many key/value heads as query heads; leave out --kv-heads");
    require(!gpt2 || head_dim == 0 || head_dim * heads == hidden, "gpt2's heads share out --hidden ", hidden,
            " exactly; leave out --head-dim");
    require(window == 0 || family == "mistral", "--window is for --family mistral; ", family, " has no sliding window");
    const Index half_heads = heads % 2 == 0 ? heads / 2 : heads;
    Config c = make_config(family, vocab, hidden, layers, heads,
                           kv_heads ? kv_heads
                           : gpt2   ? heads
                                    : half_heads,
                           head_dim ? head_dim : hidden / heads,
                           mlp    ? mlp
                           : gpt2 ? 4 * hidden
                                  : round_up(hidden * 8 / 3, 32),
                           max_length, tied == "yes" || (tied == "auto" && (gpt2 || qwen)));
    if (family == "mistral") c.window = window ? window : 256;
    validate(c);
    return c;
  }
};

inline std::string describe(const Config& c) {
  return format(
      "%s, %s parameters: %ld layers of width %ld, %ld query and %ld key/value heads of %ld, MLP %ld, vocabulary "
      "%ld%s%s",
      c.family.c_str(), human_count(static_cast<double>(parameter_count(c))).c_str(), c.layers, c.hidden, c.heads,
      c.kv_heads, c.head_dim, c.mlp, c.vocab, c.tied ? " (tied)" : "",
      c.window ? format(", window %ld", c.window).c_str() : "");
}

inline void check_chunk(Index chunk, Index tile = kTile) {
  require(chunk > 0 && chunk % tile == 0, "--chunk ", chunk, " is not a multiple of ", tile,
          " rows, the tile in which all work is done; try ", std::max(tile, round_up(chunk, tile)));
}

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
  const Index most = on_cpu ? 1536 : 8192;
  Device dev(static_cast<std::size_t>(3 * most * most) * sizeof(T) + 4096);
  if (on_cpu) return matmul_rates<Device, T>(dev, most, 4).back();
  Index n = 512;
  auto seconds = [&] { return 2.0 * static_cast<double>(n * n * n) / matmul_rates<Device, T>(dev, n, 2).back(); };
  while (n < most && seconds() < 2e-3) n *= 2;
  return matmul_rates<Device, T>(dev, n, 21)[10];
}

inline std::string device_name(bool gpu) {
#ifdef STREAMBP_CUDA
  if (gpu) return cuda::name();
#endif
  static_cast<void>(gpu);
  return format("%d threads", omp_get_max_threads());
}

}  // namespace streambp
