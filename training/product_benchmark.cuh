// The speed of cuBLASLt for the shapes of a model: with the one-tile algorithm, which keeps bits independent of the
// chunk, and with the library's unrestricted choice and 32 MiB of workspace, which is the baseline.
#pragma once

#include "training/product_timing.h"
#include "training/verify/product_check.cuh"

#ifdef STREAMBP_CUDA
#include <chrono>

namespace streambp::cuda {

class ProductBenchmark {
 public:
  explicit ProductBenchmark(Cuda& dev) : dev(dev) {
    workspace = allocate<std::byte>(dev, 1, static_cast<Index>(kFreeChoice.workspace), Kind::chunk);
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
    const cublasLtMatmulHeuristicResult_t choice = p.choose(dev, description, rows, kFreeChoice);
    const double flops = 2.0 * static_cast<double>(p.result.rows) * static_cast<double>(p.result.cols) *
                         static_cast<double>(p.along == Along::sum ? rows : p.a.rows * p.a.cols / p.result.rows);
    auto speed = [&](const cublasLtMatmulAlgo_t& algorithm, float waves, Matrix<std::byte> space) {
      return ProductSpeed{flops / seconds([&] { p.multiply(dev, description, layouts, algorithm, space); }), waves};
    };
    return {p.to_string(rows), speed(ours, check.wavesCount, {}), speed(choice.algo, choice.wavesCount, workspace)};
  }

 private:
  // Seconds per call: the best of three series, after a warm-up call.
  template <class F>
  double seconds(F&& f) {
    auto series = [&](int calls) {
      dev.synchronize();
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < calls; ++i) f();
      dev.synchronize();
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / calls;
    };
    const int calls = static_cast<int>(std::clamp(5e-3 / series(1), 1.0, 20.0));
    return std::min({series(calls), series(calls), series(calls)});
  }

  Cuda& dev;
  Matrix<std::byte> workspace;
};

// The three products of every linear layer of the model for `rows` rows; the weight gradient for one tile. Shapes that
// do not fit into GPU memory are skipped.
template <class T>
std::vector<ProductTiming> time_products(const Config& config, Index rows, Index tile) {
  std::vector<ProductTiming> timings;
  for (const LinearShape& s : linear_shapes(config)) {
    const auto size = static_cast<std::size_t>(s.inputs * s.outputs) * (sizeof(T) + sizeof(float)) +
                      static_cast<std::size_t>(rows * (s.inputs + aligned_width<T>(s.outputs))) * sizeof(T) +
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
    add("forward", {y, CUBLAS_OP_T, w, CUBLAS_OP_N, x, nullptr, y, Update::assign, Along::result});
    add("dx", {x, CUBLAS_OP_N, w, CUBLAS_OP_N, y, nullptr, x, Update::assign, Along::result});
    add("dw", {dw, CUBLAS_OP_N, x.slice(first), CUBLAS_OP_T, y.slice(first), nullptr, dw, Update::assign, Along::sum});
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
    const ProductTiming timing =
        ProductBenchmark(dev).time({y, CUBLAS_OP_T, w, CUBLAS_OP_N, x, nullptr, y, Update::assign, Along::result});
    if (n == most || 2.0 * static_cast<double>(n * n * n) / timing.ours.rate > 1e-3) return timing;
  }
}

}  // namespace streambp::cuda
#endif
