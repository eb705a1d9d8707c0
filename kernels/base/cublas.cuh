// Matrix products with cuBLASLt. The algorithm does not depend on the number of rows of the stream, so that a row's bits do
// not either: every number of rows uses the algorithm of one tile. Whether that suffices depends on the library, so a check
// tries its candidates before a run (training/products.cuh). If all depend on the number of rows, a product goes tile by tile.
#pragma once

#include <span>

#include "kernels/base/cuda.cuh"

namespace streambp::cuda {

// An operand as cuBLASLt sees it: a row-major matrix is its transpose, column by column.
struct Operand {
  const void* data;
  cudaDataType_t type;
  Index rows, cols, stride;

  template <class T>
  Operand(const Matrix<T>& m)
      : data(m.data),
        type(std::is_same_v<std::remove_const_t<T>, BFloat16> ? CUDA_R_16BF : CUDA_R_32F),
        rows(m.cols),
        cols(m.rows),
        stride(m.stride) {}

  // Rows of the row-major matrix.
  Operand slice(Rows r) const {
    Operand part = *this;
    part.data = static_cast<const std::byte*>(data) + r.begin * stride * (type == CUDA_R_16BF ? 2 : 4);
    part.cols = r.size();
    return part;
  }

  Index alignment() const {
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    return address == 0 ? 256 : static_cast<Index>(std::min<std::uintptr_t>(256, address & -address));
  }
};

// A cuBLASLt handle, destroyed at the end of its scope.
template <class Handle, auto destroy>
struct Owner {
  Handle handle = nullptr;
  Owner() = default;
  Owner(const Owner&) = delete;
  ~Owner() { destroy(handle); }
  operator Handle() const { return handle; }
};
using Description = Owner<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Preference = Owner<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;
struct Layout : Owner<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy> {
  Layout(const Operand& m, Index cols) {
    STREAMBP_CHECK(cublasLtMatrixLayoutCreate(&handle, m.type, static_cast<std::uint64_t>(m.rows),
                                              static_cast<std::uint64_t>(cols), m.stride));
  }
};

// Which dimension of the product runs along the stream.
enum class Along { result, sum };

// What an algorithm may use. By default there is no split-K, and a workspace too small for partial sums: every sum stays
// in one thread block, so a row's bits do not depend on other rows. `bench` compares this with the library's free choice.
struct Limits {
  std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_NONE;
  std::size_t workspace = kCounterBytes;
};
constexpr Limits kFreeChoice{CUBLASLT_REDUCTION_SCHEME_MASK, std::size_t{32} << 20};

// How a product is computed: with which of the library's candidates, best first, and whether tile by tile.
struct Choice {
  int candidate = 0;
  bool by_tile = false;
};
constexpr int kMostCandidates = 16;
struct Candidates {
  std::array<cublasLtMatmulHeuristicResult_t, kMostCandidates> found{};  // best first
  int count = 0;
  const cublasLtMatmulHeuristicResult_t& last() const { return found[static_cast<std::size_t>(count - 1)]; }
};
using ProductShape = std::array<Index, 7>;
inline std::map<ProductShape, Choice> choices;  // others: the first candidate

// result = op(a) op(b) + bias, with Update::add also + start, in the library's column order
struct Product {
  Operand result;
  cublasOperation_t op_a;
  Operand a;
  cublasOperation_t op_b;
  Operand b;
  const void* bias;
  Operand start;
  Update update;
  Along along;

  // Everything that the choice of an algorithm may depend on. `rows`: the number of rows of the stream.
  std::array<Index, 15> key(Index rows) const {
    const Index other_size = along == Along::result ? a.rows * a.cols : result.cols;
    return {rows,
            result.type,
            a.type,
            result.rows,
            other_size,
            op_a,
            op_b,
            result.stride,
            start.stride,
            a.stride,
            b.stride,
            a.alignment(),
            b.alignment(),
            result.alignment() * 512 + start.alignment(),
            (bias ? 1 : 0) + (update == Update::add ? 2 : 0)};
  }

  // What it computes, for any number of rows.
  ProductShape shape() const {
    return {result.type,
            a.type,
            result.rows,
            along == Along::result ? a.rows * a.cols : result.cols,
            op_a,
            op_b,
            (bias ? 1 : 0) + (update == Update::add ? 2 : 0)};
  }
  Choice choice() const {
    const auto found = choices.find(shape());
    return found == choices.end() ? Choice{} : found->second;
  }

  Index rows_of_stream() const { return b.cols; }

  void describe(Description& description) const {
    STREAMBP_CHECK(cublasLtMatmulDescCreate(&description.handle, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
      STREAMBP_CHECK(cublasLtMatmulDescSetAttribute(description, attribute, &value, sizeof(value)));
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, op_a);
    set(CUBLASLT_MATMUL_DESC_TRANSB, op_b);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT);
    if (!bias) return;
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, a.type);
  }

  struct Layouts {
    Layout a, b, start, result;
    Layouts(const Product& p, Index rows)
        : a(p.a, p.along == Along::sum ? rows : p.a.cols),
          b(p.b, rows),
          start(p.start, p.along == Along::sum ? p.start.cols : rows),
          result(p.result, p.along == Along::sum ? p.result.cols : rows) {}
  };

  // The library's candidates for this number of rows, best first: one at least.
  Candidates candidates(Cuda& dev, const Description& description, Index rows, int most,
                        const Limits& limits = {}) const {
    const Layouts layouts(*this, rows);
    Preference preference;
    STREAMBP_CHECK(cublasLtMatmulPreferenceCreate(&preference.handle));
    auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      STREAMBP_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
    };
    auto alignment = [](const Operand& m) { return static_cast<std::uint32_t>(m.alignment()); };
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, limits.reductions);
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, limits.workspace);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(a));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(b));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(start));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(result));
    Candidates all;
    int count = 0;
    STREAMBP_CHECK(cublasLtMatmulAlgoGetHeuristic(dev.blas, description, layouts.a, layouts.b, layouts.start,
                                                  layouts.result, preference, most, all.found.data(), &count));
    for (const auto& candidate : std::span(all.found).first(static_cast<std::size_t>(count)))
      if (candidate.state == CUBLAS_STATUS_SUCCESS) all.found[static_cast<std::size_t>(all.count++)] = candidate;
    require(all.count > 0, "cuBLASLt has no algorithm for ", to_string(rows));
    return all;
  }

  // The algorithm chosen for one tile of rows, used for any number of rows. If the library rejects it for some number
  // of rows, that number gets its own algorithm and the device records the change.
  const cublasLtMatmulAlgo_t& algorithm(Cuda& dev, const Description& description, const Layouts& layouts) const {
    const Index rows = rows_of_stream();
    const auto known = dev.algorithms.find(key(rows));
    if (known != dev.algorithms.end()) return known->second;
    auto tile = dev.algorithms.find(key(dev.tile));
    if (tile == dev.algorithms.end()) {
      tile = dev.algorithms
                 .emplace(key(dev.tile), candidates(dev, description, dev.tile, choice().candidate + 1).last().algo)
                 .first;
    }
    cublasLtMatmulHeuristicResult_t check{};
    const cublasStatus_t status = cublasLtMatmulAlgoCheck(dev.blas, description, layouts.a, layouts.b, layouts.start,
                                                          layouts.result, &tile->second, &check);
    if (status == CUBLAS_STATUS_SUCCESS && check.workspaceSize <= kCounterBytes) {
      return dev.algorithms.emplace(key(rows), tile->second).first->second;
    }
    dev.report_algorithm_change("cuBLASLt rejects the algorithm of one tile (" + std::to_string(dev.tile) +
                                " rows) for " + to_string(rows) + ": " + cublasLtGetStatusString(status) +
                                "; with another one, bits may depend on the chunk");
    return dev.algorithms.emplace(key(rows), candidates(dev, description, rows, 1).last().algo).first->second;
  }

  void compute(Cuda& dev) const {
    if (result.rows == 0 || result.cols == 0 || dev.only_accounts) return;
    if (const Index rows = rows_of_stream(); choice().by_tile && rows > dev.tile) {
      for (Index t = 0; t < ceil_div(rows, dev.tile); ++t) {
        Product part = *this;
        const Rows tile = piece(t, dev.tile, rows);
        part.b = b.slice(tile), part.start = start.slice(tile), part.result = result.slice(tile);
        part.compute(dev);
      }
      return;
    }
    Description description;
    describe(description);
    const Layouts layouts(*this, rows_of_stream());
    multiply(dev, description, layouts, algorithm(dev, description, layouts), {dev.counter, kCounterBytes});
  }

  void multiply(Cuda& dev, const Description& description, const Layouts& layouts,
                const cublasLtMatmulAlgo_t& algorithm, std::span<std::byte> workspace) const {
    const float alpha = 1, beta = update == Update::add ? 1 : 0;
    ++dev.launches;
    STREAMBP_CHECK(cublasLtMatmul(dev.blas, description, &alpha, a.data, layouts.a, b.data, layouts.b, &beta,
                                  start.data, layouts.start, const_cast<void*>(result.data), layouts.result, &algorithm,
                                  workspace.data(), workspace.size(), dev.stream));
  }

  // "the product of 300 rows of 64 numbers to 48 (bfloat16)"
  std::string to_string(Index rows) const {
    const Index inputs = along == Along::sum ? result.rows : op_a == CUBLAS_OP_T ? a.rows : a.cols;
    const Index outputs = along == Along::sum ? result.cols : result.rows;
    return std::string(along == Along::sum ? "the weight gradient of " : "the product of ") + std::to_string(rows) +
           " rows of " + std::to_string(inputs) + " numbers to " + std::to_string(outputs) +
           (a.type == CUDA_R_16BF ? " (bfloat16)" : " (float32)");
  }
};

// cuBLASLt has fast kernels for multiples of 8 outputs only: GPT-2's 50257 ran at 100 TFLOP/s on an H100. So the last few
// outputs are a separate product. It comes first, because dx rounds its sum to bfloat16 before it adds the large one.
inline std::vector<Rows> parts_of(Index outputs) {
  const Index most = outputs > 64 ? outputs / 8 * 8 : outputs;
  if (most == outputs) return {{0, outputs}};
  return {{most, outputs}, {0, most}};
}

// y = x wᵀ + bias, with Update::add also + start
template <class T, class Y>
Product forward_product(Matrix<Y> y, Input<T> x, Input<T> w, const void* bias, Input<Y> start, Update update) {
  return {y, CUBLAS_OP_T, w, CUBLAS_OP_N, x, bias, start, update, Along::result};
}
// dx = dy w, with Update::add also + start
template <class T, class X>
Product input_product(Matrix<X> dx, Input<T> dy, Input<T> w, Input<X> start, Update update) {
  return {dx, CUBLAS_OP_N, w, CUBLAS_OP_N, dy, nullptr, start, update, Along::result};
}
// dw = dyᵀ x, or dw += dyᵀ x
template <class T>
Product weight_product(Matrix<float> dw, Matrix<T> dy, Input<T> x, Update update) {
  return {dw, CUBLAS_OP_N, x, CUBLAS_OP_T, dy, nullptr, dw, update, Along::sum};
}

}  // namespace streambp::cuda
