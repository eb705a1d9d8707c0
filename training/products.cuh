// The matrix products of a model by cuBLASLt: a check of their bits, and their speed.
#pragma once

#include "model/parameters.h"
#include "training/product_timing.h"

#ifdef STREAMBP_CUDA
#include <algorithm>
#include <set>

#include "kernels/base/cublas.cuh"
#include "kernels/base/packs.cuh"

namespace streambp::cuda {

// A linear layer, and how the model uses it. A product of one column is not the library's.
struct LinearShape {
  Index inputs, outputs;
  bool bias = false, residual = false;
  bool adds = false;    // its backward pass adds to dx
  bool logits = false;  // its outputs are float32 logits, in aligned rows; their gradient lies in the same memory
  auto operator<=>(const LinearShape&) const = default;
};

inline std::vector<LinearShape> linear_shapes(const Config& c) {
  std::set<LinearShape> shapes = {{.inputs = c.hidden, .outputs = c.vocab, .logits = true}};
  Tensors<float> tensors(c);
  for (Index l = 0; l < c.layers; ++l) {
    const bool plain = !c.has_post_norms(l) && c.residual_scale == 1;  // else the residual is added later
    const Table<float> all = layer_table(c, l, tensors.layers[static_cast<std::size_t>(l)]);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Parameter& p = all[i].parameter;
      if (*p.group && p.experts == 0) {
        const std::string bias = p.name.substr(0, p.name.rfind('.')) + ".bias";
        const bool has_bias = i + 1 < all.size() && all[i + 1].parameter.name == bias,
                   residual = p.init == Init::residual;
        shapes.insert({p.cols, p.rows, has_bias, residual && plain, !residual});
      } else if (p.adapter()) {  // a thin matrix is a linear layer
        shapes.insert({.inputs = p.cols, .outputs = p.rows, .residual = p.init == Init::adapter_b, .adds = true});
      }
    }
  }
  std::set<LinearShape> parts;
  for (LinearShape s : shapes) {
    const std::vector<Rows> outputs = parts_of(s.outputs);
    for (const Rows part : outputs) {
      s.outputs = part.size(), s.adds = s.adds || outputs.size() > 1;
      parts.insert(s);
    }
  }
  return {parts.begin(), parts.end()};
}

// Random numbers in -1 .. 1. To save host time on large matrices, a random pattern is repeated; its length is prime, so
// rows differ.
template <class T>
Matrix<T> repeated_noise(Cuda& dev, Index rows, Index cols, std::uint64_t seed) {
  const Matrix<T> m = allocate<T>(dev, rows, cols, Kind::chunk);
  std::vector<T> pattern(static_cast<std::size_t>(least(65521, m.size())));
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    pattern[i] = static_cast<T>(static_cast<float>(2 * Random(seed).uniform(i) - 1));
  }
  const Matrix<T> all = m.reshape(m.size());
  Index done = static_cast<Index>(pattern.size());
  dev.upload(all.columns(0, done), pattern.data());
  for (Index count; done < m.size(); done += count) {
    count = least(done, m.size() - done);
    dev.copy(all.columns(done, count), all.columns(0, count));
  }
  return m;
}

// The outputs of a layer, or their gradient.
template <class T>
Matrix<T> output_noise(Cuda& dev, const LinearShape& s, Index rows, std::uint64_t seed) {
  constexpr Index numbers = sizeof(float) / sizeof(T);  // for each logit
  const Index width = s.logits ? numbers * aligned_width<float>(s.outputs) : s.outputs;
  return repeated_noise<T>(dev, rows, width, seed).columns(0, s.outputs);
}

template <class T>
bool equal_bits(Cuda& dev, Matrix<std::int32_t> flag, Matrix<T> a, Matrix<T> b) {
  using Bits = std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint32_t>;
  std::int32_t differs = 0;
  dev.upload(flag, &differs);
  auto f = [=] __device__(auto n, Index i, Index j) {
    const auto x = reinterpret_cast<const Bits*>(a.row(i) + j), y = reinterpret_cast<const Bits*>(b.row(i) + j);
    for (int k = 0; k < n(); ++k) {
      if (x[k] != y[k]) flag(0, 0) = 1;
    }
  };
  for_each_pack(dev, a.rows, a.cols, f, a, b);
  dev.download(&differs, flag);
  return differs == 0;
}

// --- The same bits alone and inside a chunk ---

// Whether a row of a product has the same bits alone and inside a chunk depends on cuBLASLt, so every GPU run checks it
// once per shape before it starts: one tile of rows, and its first 256, 255, 33 and 1, against the same rows inside a chunk
// of two tiles. It takes the library's first candidate that passes, which takes a few milliseconds; if none does, the first
// that passes when it computes the chunk tile by tile.
template <class T>
class ProductCheck {
 public:
  ProductCheck(const LinearShape& shape, Index tile) : shape(shape), dev(bytes(shape, tile), tile) {
    w = repeated_noise<T>(dev, shape.outputs, shape.inputs, 1);
    bias = repeated_noise<T>(dev, 1, shape.outputs, 2);
    flag = allocate<std::int32_t>(dev, 1, 1, Kind::chunk);
  }

  static std::size_t bytes(const LinearShape& s, Index tile) {
    const Index outputs = aligned_width<T>(s.outputs);
    const Index weights = (s.inputs + 1) * outputs,
                rows = 5 * tile * most(s.inputs, outputs) + 2 * tile * least(s.inputs, outputs);
    return static_cast<std::size_t>(weights) * sizeof(T) +
           static_cast<std::size_t>(rows) * (s.logits ? sizeof(float) : sizeof(T)) + (std::size_t{1} << 16);
  }

  // Throws an Error that names the product if a row's bits depend on other rows with every candidate.
  void run() {
    auto input = [&](Index rows, std::uint64_t seed) { return repeated_noise<T>(dev, rows, shape.inputs, seed); };
    auto output = [&](Index rows, std::uint64_t seed) { return output_noise<T>(dev, shape, rows, seed); };
    auto logits = [&](Index rows, std::uint64_t seed) { return output_noise<float>(dev, shape, rows, seed); };
    auto forward = [&](auto& result, const void* bias, Update update) {
      check(input, result,
            [=, this](auto y, auto start, Matrix<T> x) { return forward_product<T>(y, x, w, bias, start, update); });
    };
    auto backward = [&](Update update) {
      check(output, input, [=, this](Matrix<T> dx, Matrix<T> start, Matrix<T> dy) {
        return input_product<T>(dx, dy, w, start, update);
      });
    };
    if (shape.logits) {
      forward(logits, nullptr, Update::assign);
    } else if (shape.outputs > 1) {
      forward(output, shape.bias ? bias.data : nullptr, shape.residual ? Update::add : Update::assign);
    }
    if (shape.inputs == 1) return;
    backward(Update::assign);
    if (shape.adds) backward(Update::add);
  }

 private:
  // Computes product(result, start, operand) for a chunk of two tiles, and for parts of its second tile alone.
  // operand(rows, seed) and result(rows, seed) allocate noise of their shapes.
  template <class Operand, class Result, class F>
  void check(Operand&& operand, Result&& result, F&& product) {
    auto scope = dev.scope();
    const Matrix<T> x = operand(2 * dev.tile, 3);
    const auto start = result(2 * dev.tile, 4), chunk = result(2 * dev.tile, 5), alone = result(dev.tile, 6);
    const Product whole = product(chunk, start, x);
    Description description;
    whole.describe(description);
    const int candidates = whole.candidates(dev, description, dev.tile, kMostCandidates).count;
    std::string different;
    for (const bool by_tile : {false, true}) {
      for (int candidate = 0; candidate < candidates; ++candidate) {
        choices[whole.shape()] = {candidate, by_tile};
        dev.algorithms.clear(), dev.algorithm_changes.clear();
        whole.compute(dev);
        different.clear();
        for (Index count : {dev.tile, kTile, kTile - 1, Index{33}, Index{1}}) {
          const Rows part = {dev.tile, dev.tile + count};
          const Product alone_product = product(alone.slice({0, count}), start.slice(part), x.slice(part));
          alone_product.compute(dev);
          if (!dev.algorithm_changes.empty() || !equal_bits(dev, flag, alone.slice({0, count}), chunk.slice(part)))
            different = alone_product.to_string(count);
        }
        if (different.empty()) return;
      }
    }
    fail("cuBLASLt: ", different, " has different bits inside a chunk of ", 2 * dev.tile,
         " rows with every algorithm, so gradients would depend on the chunk; use another version of cuBLASLt");
  }

  const LinearShape shape;
  Cuda dev;
  Matrix<T> w, bias;
  Matrix<std::int32_t> flag;
};

// Checks the model's products before a run takes the GPU's memory. Shapes for which two tiles do not fit into memory
// are skipped: the run cannot use them either.
template <class T>
void check_products(const Config& config, Index tile) {
  for (const LinearShape& shape : linear_shapes(config)) {
    if (ProductCheck<T>::bytes(shape, tile) <= free_memory()) ProductCheck<T>(shape, tile).run();
  }
}

// --- Speed ---

// With the one-tile algorithm, which keeps bits independent of the chunk; with the library's first algorithm that splits no
// sum but has 32 MiB of workspace; and with its unrestricted choice and this workspace, which is the baseline.
class ProductBenchmark {
 public:
  explicit ProductBenchmark(Cuda& dev) : dev(dev) {
    const auto m = allocate<std::byte>(dev, 1, static_cast<Index>(kFreeChoice.workspace), Kind::chunk);
    workspace = {m.data, kFreeChoice.workspace};
  }

  ProductTiming time(const Product& p) {
    const Index rows = p.rows_of_stream();
    Description description;
    p.describe(description);
    const Product::Layouts layouts(p, rows);
    const cublasLtMatmulAlgo_t ours = p.algorithm(dev, description, layouts);
    cublasLtMatmulHeuristicResult_t check{};
    STREAMBP_CHECK(cublasLtMatmulAlgoCheck(dev.blas, description, layouts.a, layouts.b, layouts.start, layouts.result,
                                           &ours, &check));
    const auto best = [&](const Limits& limits) { return p.candidates(dev, description, rows, 1, limits).last(); };
    const auto unsplit = best({.workspace = kFreeChoice.workspace}), choice = best(kFreeChoice);
    const double flops = 2.0 * static_cast<double>(p.result.rows) * static_cast<double>(p.result.cols) *
                         static_cast<double>(p.along == Along::sum ? rows : p.a.rows * p.a.cols / p.result.rows);
    auto speed = [&](const cublasLtMatmulAlgo_t& algorithm, float waves, std::span<std::byte> space) {
      return ProductSpeed{flops / seconds([&] { p.multiply(dev, description, layouts, algorithm, space); }), waves};
    };
    return {p.to_string(rows), speed(ours, check.wavesCount, {dev.counter, kCounterBytes}),
            speed(unsplit.algo, unsplit.wavesCount, workspace), speed(choice.algo, choice.wavesCount, workspace)};
  }

 private:
  // Seconds per call: the best of three series, after a warm-up call.
  template <class F>
  double seconds(F&& f) {
    auto series = [&](int calls) {
      dev.synchronize();
      const Stopwatch watch;
      for (int i = 0; i < calls; ++i) f();
      dev.synchronize();
      return watch.seconds() / calls;
    };
    const int calls = static_cast<int>(std::clamp(5e-3 / series(1), 1.0, 20.0));
    return std::min({series(calls), series(calls), series(calls)});
  }

  Cuda& dev;
  std::span<std::byte> workspace;
};

// The three products of every linear layer of the model for `rows` rows; the weight gradient for one tile. Shapes that
// do not fit into GPU memory are skipped.
template <class T>
std::vector<ProductTiming> time_products(const Config& config, Index rows, Index tile) {
  std::vector<ProductTiming> timings;
  for (const LinearShape& s : linear_shapes(config)) {
    const auto size = static_cast<std::size_t>(s.inputs * s.outputs) * (sizeof(T) + sizeof(float)) +
                      static_cast<std::size_t>(rows * (s.inputs + aligned_width<T>(s.outputs))) *
                          (s.logits ? sizeof(float) : sizeof(T)) +
                      kFreeChoice.workspace + (std::size_t{1} << 16);
    if (size > free_memory()) continue;
    Cuda dev(size, tile);
    ProductBenchmark benchmark(dev);
    const Matrix<T> w = repeated_noise<T>(dev, s.outputs, s.inputs, 1), x = repeated_noise<T>(dev, rows, s.inputs, 2),
                    y = output_noise<T>(dev, s, rows, 3);
    const Matrix<float> dw = allocate<float>(dev, s.outputs, s.inputs, Kind::chunk);
    const Rows first = piece(0, tile, rows);
    auto add = [&](const char* name, const Product& p) {
      timings.push_back(benchmark.time(p));
      timings.back().name = name + std::string(": ") + timings.back().name;
    };
    if (s.logits) {
      const Matrix<float> logits(reinterpret_cast<float*>(y.data), y.rows, y.cols, aligned_width<float>(y.cols));
      add("forward", forward_product<T>(logits, x, w, nullptr, logits, Update::assign));
    } else {
      add("forward", forward_product<T>(y, x, w, nullptr, y, Update::assign));
    }
    add("dx", input_product<T>(x, y, w, x, Update::assign));
    add("dw", weight_product(dw, y.slice(first), x.slice(first), Update::assign));
  }
  return timings;
}

// Square products that take a few milliseconds: the baseline of "of matmul".
template <class T>
ProductTiming time_large_product() {
  constexpr Index most = sizeof(T) == 2 ? 8192 : 4096;
  for (Index n = 128;; n *= 2) {
    Cuda dev(static_cast<std::size_t>(3 * n * n) * sizeof(T) + kFreeChoice.workspace + (std::size_t{1} << 16));
    const Matrix<T> w = repeated_noise<T>(dev, n, n, 1), x = repeated_noise<T>(dev, n, n, 2),
                    y = repeated_noise<T>(dev, n, n, 3);
    const ProductTiming timing = ProductBenchmark(dev).time(forward_product<T>(y, x, w, nullptr, y, Update::assign));
    if (n == most || 2.0 * static_cast<double>(n * n * n) / timing.ours.rate > 1e-3) return timing;
  }
}

}  // namespace streambp::cuda
#endif
