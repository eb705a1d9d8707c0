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

  Multiplication() {
    cublasLtCreate(&handle);
    cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F);
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
  // d = a b
  cublasStatus_t operator()(Columns& a, Columns& b, Columns& d) {
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    const float one = 1, zero = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, op, a.layout, b.layout, d.layout, d.layout,
                                                                 preference, 1, &found, &count);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    EXPECT_EQ(count, 1);
    return cublasLtMatmul(handle, op, &one, a.data(), a.layout, b.data(), b.layout, &zero, nullptr, d.layout, d.data(),
                          d.layout, &found.algo, nullptr, 0, nullptr);
  }
};

TEST(CudaOnCpu, CublasLtRejectsAlgorithmsAndReordersSumsOnRequest) {
  Columns a(CUDA_R_32F, 8, 50, 1), b(CUDA_R_32F, 50, 6, 2), up(CUDA_R_32F, 8, 6, 3), down(CUDA_R_32F, 8, 6, 3);
  Multiplication multiply;
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
  EXPECT_EQ(multiply(a, b, up), CUBLAS_STATUS_SUCCESS);
  cuda_on_cpu::descends = [](const cuda_on_cpu::Product& p) { return p.k == 50; };
  EXPECT_EQ(multiply(a, b, down), CUBLAS_STATUS_SUCCESS);
  cuda_on_cpu::descends = nullptr;
  EXPECT_NE(up.storage, down.storage);
  for (std::size_t i = 0; i < 8; ++i) EXPECT_NEAR(up(i, 3), down(i, 3), 1e-4);
}

TEST(CudaOnCpu, CublasLtRefusesMismatchedOperands) {
  Columns a(CUDA_R_32F, 8, 4, 1), b(CUDA_R_32F, 4, 6, 2), d(CUDA_R_32F, 8, 6, 3);
  Columns narrow(CUDA_R_16BF, 8, 6, 3), narrow_a(CUDA_R_16BF, 8, 4, 1);
  Multiplication multiply;
  EXPECT_EQ(multiply(a, b, d), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(multiply(b, a, d), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(multiply(a, b, b), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(multiply(a, b, narrow), CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(multiply(narrow_a, b, d), CUBLAS_STATUS_NOT_SUPPORTED);
  d.layout->stride = 7;
  EXPECT_EQ(multiply(a, b, d), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_STREQ(cublasGetStatusName(CUBLAS_STATUS_INVALID_VALUE), "CUBLAS_STATUS_INVALID_VALUE");
}

}  // namespace
}  // namespace streambp::emulation
