// One product of matrices by cuBLASLt, in an algorithm that does not depend on how many rows of the stream it has.
#pragma once

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

  // Everything that may have a say in how it is computed; the rows of the stream only where they must.
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
            (bias ? 1 : 0) + (add_start ? 2 : 0)};
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
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, result.type);
  }

  struct Layouts {
    Layout a, b, start, result;
    Layouts(const Product& p, Index rows)
        : a(p.a, p.along == Along::sum ? rows : p.a.cols),
          b(p.b, rows),
          start(p.start, p.along == Along::sum ? p.start.cols : rows),
          result(p.result, p.along == Along::sum ? p.result.cols : rows) {}
  };

  // The library's choice for so many rows, among those that leave every sum to one block.
  cublasLtMatmulAlgo_t choose(Cuda& dev, const Description& description, Index rows) const {
    const Layouts layouts(*this, rows);
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
    STREAMBP_CHECK(cublasLtMatmulAlgoGetHeuristic(dev.blas, description, layouts.a, layouts.b, layouts.start,
                                                  layouts.result, preference, 1, &choice, &count));
    require(count > 0, "cuBLASLt has no algorithm for a product that makes rows of ", result.rows, " numbers");
    return choice.algo;
  }

  // The choice for one tile of rows, for any number of them; where the library cannot use it, its choice for that number.
  const cublasLtMatmulAlgo_t& algorithm(Cuda& dev, const Description& description, const Layouts& layouts) const {
    const auto known = dev.algorithms.find(key(rows_of_stream()));
    if (known != dev.algorithms.end()) return known->second;
    auto tile = dev.algorithms.find(key(dev.tile));
    if (tile == dev.algorithms.end()) {
      tile = dev.algorithms.emplace(key(dev.tile), choose(dev, description, dev.tile)).first;
    }
    cublasLtMatmulHeuristicResult_t check{};
    const bool usable = cublasLtMatmulAlgoCheck(dev.blas, description, layouts.a, layouts.b, layouts.start,
                                                layouts.result, &tile->second, &check) == CUBLAS_STATUS_SUCCESS &&
                        check.workspaceSize == 0;
    const auto chosen = usable ? tile->second : choose(dev, description, rows_of_stream());
    return dev.algorithms.emplace(key(rows_of_stream()), chosen).first->second;
  }

  void compute(Cuda& dev) const {
    if (result.rows == 0 || result.cols == 0) return;
    Description description;
    describe(description);
    const Layouts layouts(*this, rows_of_stream());
    const float alpha = 1, beta = add_start ? 1 : 0;
    STREAMBP_CHECK(cublasLtMatmul(dev.blas, description, &alpha, a.data, layouts.a, b.data, layouts.b, &beta,
                                  start.data, layouts.start, const_cast<void*>(result.data), layouts.result,
                                  &algorithm(dev, description, layouts), nullptr, 0, dev.stream));
  }
};

}  // namespace streambp::cuda
