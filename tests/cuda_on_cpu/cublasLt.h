// The part of cuBLASLt that the program calls, as plain loops: D = alpha op(A) op(B) + beta C (+ bias).
//
// Matrices are stored by columns, as in BLAS. For all shapes, every sum runs over ascending k in float32, so the bits
// of an element of D depend only on its row of op(A), its column of op(B), C and bias. Tests can break this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "cuda_runtime.h"

enum cublasStatus_t {
  CUBLAS_STATUS_SUCCESS = 0,
  CUBLAS_STATUS_INVALID_VALUE = 7,
  CUBLAS_STATUS_EXECUTION_FAILED = 13,
  CUBLAS_STATUS_NOT_SUPPORTED = 15
};
enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_16BF = 14 };
using cudaDataType = cudaDataType_t;
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68 };
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasLtEpilogue_t { CUBLASLT_EPILOGUE_DEFAULT = 1, CUBLASLT_EPILOGUE_BIAS = 4 };
enum cublasLtReductionScheme_t { CUBLASLT_REDUCTION_SCHEME_NONE = 0, CUBLASLT_REDUCTION_SCHEME_MASK = 7 };
enum cublasLtMatmulDescAttributes_t {
  CUBLASLT_MATMUL_DESC_TRANSA = 3,
  CUBLASLT_MATMUL_DESC_TRANSB = 4,
  CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
  CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
  CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE = 26
};
enum cublasLtMatmulPreferenceAttributes_t {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
  CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
};

struct cublasLtContext {};
struct cublasLtMatmulDescOpaque_t {
  cublasOperation_t transa = CUBLAS_OP_N, transb = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  std::int32_t bias_type = -1;  // -1: the type of D
};
struct cublasLtMatrixLayoutOpaque_t {
  cudaDataType type;
  std::uint64_t rows, cols;
  std::int64_t stride;  // elements from one column to the next
};
struct cublasLtMatmulPreferenceOpaque_t {};
using cublasLtHandle_t = cublasLtContext*;
using cublasLtMatmulDesc_t = cublasLtMatmulDescOpaque_t*;
using cublasLtMatrixLayout_t = cublasLtMatrixLayoutOpaque_t*;
using cublasLtMatmulPreference_t = cublasLtMatmulPreferenceOpaque_t*;
struct cublasLtMatmulAlgo_t {
  std::uint64_t data[8];
};
struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo;
  std::size_t workspaceSize;
  cublasStatus_t state;
  float wavesCount;
  int reserved[4];
};

namespace cuda_on_cpu {

inline constexpr Name<cublasStatus_t> kStatusNames[] = {
    {CUBLAS_STATUS_SUCCESS, "CUBLAS_STATUS_SUCCESS", "success"},
    {CUBLAS_STATUS_INVALID_VALUE, "CUBLAS_STATUS_INVALID_VALUE", "an unsupported value or parameter was passed"},
    {CUBLAS_STATUS_EXECUTION_FAILED, "CUBLAS_STATUS_EXECUTION_FAILED", "the GPU program failed to execute"},
    {CUBLAS_STATUS_NOT_SUPPORTED, "CUBLAS_STATUS_NOT_SUPPORTED", "the functionality requested is not supported"}};

template <class T>
cublasStatus_t set_attribute(T& field, const void* value, std::size_t bytes) {
  if (!value || bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&field, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

template <class T, class... Fields>
cublasStatus_t create(T** object, Fields... fields) {
  if (!object) return CUBLAS_STATUS_INVALID_VALUE;
  *object = new T{fields...};
  return CUBLAS_STATUS_SUCCESS;
}
template <class T>
cublasStatus_t destroy(T* object) {
  delete object;
  return CUBLAS_STATUS_SUCCESS;
}

inline float number_at(const void* data, int type, std::size_t i) {
  if (type == CUDA_R_32F) return static_cast<const float*>(data)[i];
  return low_bf16(static_cast<const std::uint16_t*>(data)[i]);
}
inline void put_number(void* data, int type, std::size_t i, float x) {
  if (type == CUDA_R_32F)
    static_cast<float*>(data)[i] = x;
  else
    static_cast<std::uint16_t*>(data)[i] = static_cast<std::uint16_t>(round_to_bf16(x));
}

struct Product {
  std::size_t m, n, k;  // D is m x n, the sums have k terms
  std::uint64_t algorithm = 0;
};
inline int candidates = 1;  // algorithms for each product; all give the same bits

// Products of many columns need a workspace, for the counter with which thread blocks take tiles.
inline std::size_t needed_workspace(const Product& p) { return p.n > 256 ? 4 : 0; }

// Test hooks: products for which the library rejects an algorithm, or sums over descending k.
inline std::function<bool(const Product&)> rejects, descends;

// Counts products with a column that does not start at a multiple of 16 bytes. Tensor cores cannot read those directly.
inline std::size_t misaligned_products = 0;
inline bool misaligned(const void* data, cublasLtMatrixLayout_t m) {
  const std::size_t bytes = m->type == CUDA_R_32F ? 4 : 2;
  return reinterpret_cast<std::uintptr_t>(data) % 16 != 0 ||
         (m->cols > 1 && static_cast<std::size_t>(m->stride) * bytes % 16 != 0);
}

inline cublasStatus_t check_product(cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, Product* product = nullptr) {
  if (!op || !a || !b || !c || !d) return CUBLAS_STATUS_INVALID_VALUE;
  const bool ta = op->transa != CUBLAS_OP_N, tb = op->transb != CUBLAS_OP_N;
  const Product p{ta ? a->cols : a->rows, tb ? b->rows : b->cols, ta ? a->rows : a->cols};
  for (const auto* matrix : {a, b, c, d}) {
    if (matrix->stride < static_cast<std::int64_t>(matrix->rows) || matrix->rows == 0 || matrix->cols == 0)
      return CUBLAS_STATUS_INVALID_VALUE;
  }
  if ((tb ? b->cols : b->rows) != p.k || c->rows != p.m || d->rows != p.m || c->cols != p.n || d->cols != p.n)
    return CUBLAS_STATUS_INVALID_VALUE;
  if (op->epilogue == CUBLASLT_EPILOGUE_BIAS && !op->bias) return CUBLAS_STATUS_INVALID_VALUE;
  // The combinations that the library computes in float32.
  const bool narrows = a->type == CUDA_R_32F && d->type == CUDA_R_16BF;
  if (a->type != b->type || c->type != d->type || narrows) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (product) *product = p;
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace cuda_on_cpu

inline const char* cublasGetStatusName(cublasStatus_t status) {
  return cuda_on_cpu::find_name(cuda_on_cpu::kStatusNames, status).name;
}
inline const char* cublasGetStatusString(cublasStatus_t status) {
  return cuda_on_cpu::find_name(cuda_on_cpu::kStatusNames, status).text;
}

inline cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return cuda_on_cpu::create(handle); }
inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return cuda_on_cpu::destroy(handle); }

inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* op, cublasComputeType_t compute,
                                               cudaDataType_t scale) {
  if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  return cuda_on_cpu::create(op);
}
inline const char* cublasLtGetStatusString(cublasStatus_t status) { return cublasGetStatusString(status); }
inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t op) { return cuda_on_cpu::destroy(op); }
inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t op, cublasLtMatmulDescAttributes_t attribute,
                                                     const void* value, std::size_t bytes) {
  if (!op) return CUBLAS_STATUS_INVALID_VALUE;
  if (attribute == CUBLASLT_MATMUL_DESC_TRANSA) return cuda_on_cpu::set_attribute(op->transa, value, bytes);
  if (attribute == CUBLASLT_MATMUL_DESC_TRANSB) return cuda_on_cpu::set_attribute(op->transb, value, bytes);
  if (attribute == CUBLASLT_MATMUL_DESC_EPILOGUE) return cuda_on_cpu::set_attribute(op->epilogue, value, bytes);
  if (attribute == CUBLASLT_MATMUL_DESC_BIAS_POINTER) return cuda_on_cpu::set_attribute(op->bias, value, bytes);
  if (attribute == CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE) return cuda_on_cpu::set_attribute(op->bias_type, value, bytes);
  return CUBLAS_STATUS_NOT_SUPPORTED;
}

inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, std::uint64_t rows,
                                                 std::uint64_t cols, std::int64_t stride) {
  return cuda_on_cpu::create(layout, type, rows, cols, stride);
}
inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t m) { return cuda_on_cpu::destroy(m); }

inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) { return cuda_on_cpu::create(p); }
inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) { return cuda_on_cpu::destroy(p); }
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                           cublasLtMatmulPreferenceAttributes_t attribute,
                                                           const void* value, std::size_t bytes) {
  const std::size_t expected = attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8 : 4;
  return preference && value && bytes == expected ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t op,
                                                     cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                     cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                     cublasLtMatmulPreference_t preference, int requested,
                                                     cublasLtMatmulHeuristicResult_t results[], int* returned) {
  if (!handle || !preference || requested <= 0 || !results || !returned) return CUBLAS_STATUS_INVALID_VALUE;
  const cublasStatus_t status = cuda_on_cpu::check_product(op, a, b, c, d);
  *returned = status == CUBLAS_STATUS_SUCCESS ? std::min(requested, cuda_on_cpu::candidates) : 0;
  for (int i = 0; i < *returned; ++i) results[i] = {{{static_cast<std::uint64_t>(i)}}, 0, status, 1, {}};
  return status;
}
inline cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t op,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              const cublasLtMatmulAlgo_t* algorithm,
                                              cublasLtMatmulHeuristicResult_t* result) {
  if (!handle || !algorithm || !result) return CUBLAS_STATUS_INVALID_VALUE;
  cuda_on_cpu::Product p{};
  cublasStatus_t status = cuda_on_cpu::check_product(op, a, b, c, d, &p);
  p.algorithm = algorithm->data[0];
  if (status == CUBLAS_STATUS_SUCCESS && cuda_on_cpu::rejects && cuda_on_cpu::rejects(p))
    status = CUBLAS_STATUS_NOT_SUPPORTED;
  *result = {*algorithm, cuda_on_cpu::needed_workspace(p), status, 1, {}};
  return status;
}

inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t op, const void* alpha_pointer,
                                     const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                                     cublasLtMatrixLayout_t b_layout, const void* beta_pointer, const void* c,
                                     cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                                     const cublasLtMatmulAlgo_t* algorithm, void* workspace, std::size_t bytes,
                                     cudaStream_t) {
  using namespace cuda_on_cpu;
  using Four = float __attribute__((vector_size(16)));   // a vector that every processor has
  constexpr std::size_t kFours = 8, kRows = 4 * kFours;  // rows of D computed together, in registers

  Product p{};
  const cublasStatus_t status = check_product(op, a_layout, b_layout, c_layout, d_layout, &p);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  if (!handle || !alpha_pointer || !a || !b || !beta_pointer || !d) return CUBLAS_STATUS_INVALID_VALUE;
  if (bytes < needed_workspace(p) || (bytes > 0 && !workspace)) return CUBLAS_STATUS_INVALID_VALUE;
  const float alpha = *static_cast<const float*>(alpha_pointer), beta = *static_cast<const float*>(beta_pointer);
  if (recording) {  // with copies of everything that the caller destroys
    recording->push_back([=, op = *op, a_layout = *a_layout, b_layout = *b_layout, c_layout = *c_layout,
                          d_layout = *d_layout, algorithm = *algorithm]() mutable {
      const cublasStatus_t status = cublasLtMatmul(handle, &op, &alpha, a, &a_layout, b, &b_layout, &beta, c, &c_layout,
                                                   d, &d_layout, &algorithm, workspace, bytes, nullptr);
      return status == CUBLAS_STATUS_SUCCESS ? cudaSuccess : cudaErrorIllegalAddress;
    });
    return CUBLAS_STATUS_SUCCESS;
  }
  if (beta != 0 && !c) return CUBLAS_STATUS_INVALID_VALUE;
  const int bias_type = op->bias_type < 0 ? d_layout->type : op->bias_type;
  const auto stride = [](cublasLtMatrixLayout_t m) { return static_cast<std::size_t>(m->stride); };
  p.algorithm = algorithm->data[0];
  const bool descending = descends && descends(p);
  if (misaligned(a, a_layout) || misaligned(b, b_layout) || misaligned(d, d_layout)) ++misaligned_products;
  if (next_operation() != cudaSuccess) return CUBLAS_STATUS_EXECUTION_FAILED;
  const DeviceMemory::Access access;

  // op(B) as float32, column by column.
  std::vector<float> b_panel(p.n * p.k);
  for (std::size_t j = 0; j < p.n; ++j) {
    for (std::size_t k = 0; k < p.k; ++k) {
      const std::size_t i = op->transb == CUBLAS_OP_N ? k + j * stride(b_layout) : j + k * stride(b_layout);
      b_panel[j * p.k + k] = number_at(b, b_layout->type, i);
    }
  }
  std::vector<float> a_panel(kRows * p.k);
  for (std::size_t first = 0; first < p.m; first += kRows) {
    const std::size_t rows = std::min(kRows, p.m - first);
    // These rows of op(A) as float32, column by column. The sums of rows beyond the last are not used.
    for (std::size_t k = 0; k < p.k; ++k) {
      for (std::size_t r = 0; r < rows; ++r) {
        const std::size_t i = first + r;
        a_panel[k * kRows + r] = number_at(
            a, a_layout->type, op->transa == CUBLAS_OP_N ? i + k * stride(a_layout) : k + i * stride(a_layout));
      }
    }
    for (std::size_t j = 0; j < p.n; ++j) {
      Four sums[kFours] = {};
      for (std::size_t step = 0; step < p.k; ++step) {
        const std::size_t k = descending ? p.k - 1 - step : step;
        const float b_kj = b_panel[j * p.k + k];
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kFours; ++r) {
          Four a_rk;
          std::memcpy(&a_rk, &a_panel[k * kRows + 4 * r], sizeof(Four));
          sums[r] += a_rk * b_kj;
        }
      }
      for (std::size_t r = 0; r < rows; ++r) {
        const std::size_t i = first + r;
        float value = alpha * sums[r / 4][r % 4];
        if (beta != 0) value += beta * number_at(c, c_layout->type, i + j * stride(c_layout));
        if (op->epilogue == CUBLASLT_EPILOGUE_BIAS) value += number_at(op->bias, bias_type, i);
        put_number(d, d_layout->type, i + j * stride(d_layout), value);
      }
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}
