// The emulation of cuBLASLt.
#include "tests/emulation.cuh"

namespace streambp::emulation {
namespace {

// ---- cuBLASLt ---------------------------------------------------------------------------------------------------

// A matrix stored by columns, with a gap after every column that must stay untouched.
struct Columns {
  cudaDataType type;
  std::size_t rows, cols, stride;
  std::vector<std::uint32_t> storage;  // room for either type
  cublasLtMatrixLayout_t layout = nullptr;

  Columns(cudaDataType type, std::size_t rows, std::size_t cols, unsigned seed)
      : type(type), rows(rows), cols(cols), stride(rows + 3), storage(stride * cols) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < stride * cols; ++i) cuda_on_cpu::put_number(data(), type, i, normal(random));
    cublasLtMatrixLayoutCreate(&layout, type, rows, cols, static_cast<std::int64_t>(stride));
  }
  Columns(const Columns&) = delete;
  ~Columns() { cublasLtMatrixLayoutDestroy(layout); }
  void* data() { return storage.data(); }
  float operator()(std::size_t i, std::size_t j) const {
    return cuda_on_cpu::number_at(storage.data(), type, i + j * stride);
  }
};

struct Multiplication {
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t op = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;

  Multiplication(bool ta, bool tb) {
    const cublasOperation_t a = ta ? CUBLAS_OP_T : CUBLAS_OP_N, b = tb ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtCreate(&handle);
    cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &a, sizeof(a));
    cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSB, &b, sizeof(b));
    cublasLtMatmulPreferenceCreate(&preference);
    const std::size_t workspace = 1 << 20;
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                         sizeof(workspace));
  }
  Multiplication(const Multiplication&) = delete;
  ~Multiplication() {
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtMatmulDescDestroy(op);
    cublasLtDestroy(handle);
  }
  void add(Columns& bias) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const void* data = bias.data();
    cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue));
    cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &data, sizeof(data));
    cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias.type, sizeof(bias.type));
  }
  cublasStatus_t operator()(float alpha, Columns& a, Columns& b, float beta, Columns& c, Columns& d) {
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, op, a.layout, b.layout, c.layout, d.layout,
                                                                 preference, 1, &found, &count);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    EXPECT_EQ(count, 1);
    return cublasLtMatmul(handle, op, &alpha, a.data(), a.layout, b.data(), b.layout, &beta,
                          beta == 0 ? nullptr : c.data(), c.layout, d.data(), d.layout, &found.algo, nullptr, 0,
                          nullptr);
  }
};

TEST(CudaOnCpu, CublasLtMultipliesInEveryLayout) {
  const std::size_t m = 45, n = 9, k = 33;
  for (const auto& [ta, tb] : {std::pair(true, false), {false, false}, {false, true}}) {
    for (const auto& [in, out] :
         {std::pair(CUDA_R_16BF, CUDA_R_16BF), {CUDA_R_16BF, CUDA_R_32F}, {CUDA_R_32F, CUDA_R_32F}}) {
      for (const float beta : {0.0f, 1.0f, -0.5f}) {
        for (const bool with_bias : {false, true}) {
          Columns a(in, ta ? k : m, ta ? m : k, 1), b(in, tb ? n : k, tb ? k : n, 2);
          Columns c(out, m, n, 3), d(out, m, n, 4), bias(out, m, 1, 5);
          const Columns before(out, m, n, 4);
          Multiplication multiply(ta, tb);
          if (with_bias) multiply.add(bias);
          ASSERT_EQ(multiply(2, a, b, beta, c, d), CUBLAS_STATUS_SUCCESS);
          for (std::size_t j = 0; j < n; ++j) {
            for (std::size_t i = 0; i < m; ++i) {
              double sum = 0;
              for (std::size_t l = 0; l < k; ++l)
                sum += double{ta ? a(l, i) : a(i, l)} * double{tb ? b(j, l) : b(l, j)};
              const double expected = 2 * sum + (beta != 0 ? beta * c(i, j) : 0) + (with_bias ? bias(i, 0) : 0);
              const double tolerance = out == CUDA_R_32F ? 1e-4 : 1e-4 + std::abs(expected) / 256;
              EXPECT_NEAR(d(i, j), expected, tolerance);
            }
            for (std::size_t i = m; i < m + 3 && j + 1 < n; ++i) EXPECT_EQ(d(i, j), before(i, j));
          }
        }
      }
    }
  }
}

TEST(CudaOnCpu, CublasLtBitsDoNotDependOnTheShape) {
  Columns a(CUDA_R_32F, 70, 50, 1), b(CUDA_R_32F, 50, 20, 2), whole(CUDA_R_32F, 70, 20, 3);
  ASSERT_EQ(Multiplication(false, false)(1, a, b, 0, whole, whole), CUBLAS_STATUS_SUCCESS);
  for (std::size_t i : {0, 31, 32, 69}) {
    for (std::size_t j : {0, 7, 19}) {
      Columns row(CUDA_R_32F, 1, 50, 4), column(CUDA_R_32F, 50, 1, 5), one(CUDA_R_32F, 1, 1, 6);
      for (std::size_t k = 0; k < 50; ++k) {
        cuda_on_cpu::put_number(row.data(), CUDA_R_32F, k * row.stride, a(i, k));
        cuda_on_cpu::put_number(column.data(), CUDA_R_32F, k, b(k, j));
      }
      ASSERT_EQ(Multiplication(false, false)(1, row, column, 0, one, one), CUBLAS_STATUS_SUCCESS);
      EXPECT_EQ(one(0, 0), whole(i, j));
    }
  }
}

TEST(CudaOnCpu, CublasLtRejectsAlgorithmsAndReordersSumsOnRequest) {
  Columns a(CUDA_R_32F, 8, 50, 1), b(CUDA_R_32F, 50, 6, 2), up(CUDA_R_32F, 8, 6, 3), down(CUDA_R_32F, 8, 6, 3);
  Multiplication multiply(false, false);
  cublasLtMatmulHeuristicResult_t check;
  const cublasLtMatmulAlgo_t algorithm{};
  auto checked = [&] {
    return cublasLtMatmulAlgoCheck(multiply.handle, multiply.op, a.layout, b.layout, up.layout, up.layout, &algorithm,
                                   &check);
  };
  EXPECT_EQ(checked(), CUBLAS_STATUS_SUCCESS);
  cuda_on_cpu::rejects = [](const cuda_on_cpu::Product& p) { return p.n == 6; };
  EXPECT_EQ(checked(), CUBLAS_STATUS_NOT_SUPPORTED);
  cuda_on_cpu::rejects = nullptr;
  EXPECT_EQ(multiply(1, a, b, 0, up, up), CUBLAS_STATUS_SUCCESS);
  cuda_on_cpu::descends = [](const cuda_on_cpu::Product& p) { return p.k == 50; };
  EXPECT_EQ(multiply(1, a, b, 0, down, down), CUBLAS_STATUS_SUCCESS);
  cuda_on_cpu::descends = nullptr;
  EXPECT_NE(up.storage, down.storage);
  for (std::size_t i = 0; i < 8; ++i) EXPECT_NEAR(up(i, 3), down(i, 3), 1e-4);
}

TEST(CudaOnCpu, CublasLtRefusesMismatchedOperands) {
  Columns a(CUDA_R_32F, 8, 4, 1), b(CUDA_R_32F, 4, 6, 2), d(CUDA_R_32F, 8, 6, 3);
  Columns narrow(CUDA_R_16BF, 8, 6, 3), narrow_a(CUDA_R_16BF, 8, 4, 1);
  Multiplication multiply(false, false);
  EXPECT_EQ(multiply(1, a, b, 0, d, d), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(multiply(1, b, a, 0, d, d), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(multiply(1, a, b, 0, d, b), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(multiply(1, a, b, 0, narrow, narrow), CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(multiply(1, narrow_a, b, 0, d, d), CUBLAS_STATUS_NOT_SUPPORTED);
  d.layout->stride = 7;
  EXPECT_EQ(multiply(1, a, b, 0, d, d), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_STREQ(cublasGetStatusName(CUBLAS_STATUS_INVALID_VALUE), "CUBLAS_STATUS_INVALID_VALUE");
}

}  // namespace
}  // namespace streambp::emulation
