// One product of matrices by cuBLASLt, in an algorithm that does not depend on how many rows of the stream it has.
#pragma once

#include "cuda.cuh"

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

  Index alignment() const {
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    return address == 0 ? 256 : static_cast<Index>(std::min<std::uintptr_t>(256, address & -address));
  }
};

// A handle of the library that is destroyed with its scope.
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

// Which of the product's dimensions runs along the stream.
enum class Along { result, sum };

// result = op(a) op(b) + bias + (start, if it is to be added to), in the library's column order
struct Product {
  Operand result;
  cublasOperation_t op_a;
  Operand a;
  cublasOperation_t op_b;
  Operand b;
  const void* bias;
  Operand start;
  bool add_start;
  Along along;

  // Everything that may have a say in how it is computed; not the number of rows of the stream.
  std::array<Index, 14> key() const {
    const Index other_size = along == Along::result ? a.rows * a.cols : result.cols;
    return {result.type,
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
            (bias ? 1 : 0) + (add_start ? 2 : 0)};
  }

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
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, result.type);
  }

  // The library's choice for one tile of rows, among those that leave every sum to one block.
  cublasLtMatmulAlgo_t choose_algorithm(Cuda& dev, const Description& description) const {
    const bool sum = along == Along::sum;
    const Layout la(a, sum ? dev.tile : a.cols), lb(b, dev.tile), lc(start, sum ? start.cols : dev.tile),
        ld(result, sum ? result.cols : dev.tile);
    Preference preference;
    STREAMBP_CHECK(cublasLtMatmulPreferenceCreate(&preference.handle));
    auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      STREAMBP_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
    };
    auto alignment = [](const Operand& m) { return static_cast<std::uint32_t>(m.alignment()); };
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE});
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::size_t{0});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(a));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(b));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(start));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(result));
    cublasLtMatmulHeuristicResult_t choice{};
    int count = 0;
    STREAMBP_CHECK(
        cublasLtMatmulAlgoGetHeuristic(dev.blas, description, la, lb, lc, ld, preference, 1, &choice, &count));
    require(count > 0, "cuBLASLt has no algorithm for a product that makes rows of ", result.rows, " numbers");
    return choice.algo;
  }

  void compute(Cuda& dev) const {
    if (result.rows == 0 || result.cols == 0) return;
    Description description;
    describe(description);
    auto found = dev.algorithms.find(key());
    if (found == dev.algorithms.end()) found = dev.algorithms.emplace(key(), choose_algorithm(dev, description)).first;
    const Layout la(a, a.cols), lb(b, b.cols), lc(start, start.cols), ld(result, result.cols);
    const float alpha = 1, beta = add_start ? 1 : 0;
    STREAMBP_CHECK(cublasLtMatmul(dev.blas, description, &alpha, a.data, la, b.data, lb, &beta, start.data, lc,
                                  const_cast<void*>(result.data), ld, &found->second, nullptr, 0, dev.stream));
  }
};

}  // namespace streambp::cuda
