// Elementwise kernels with vectorised access: a thread loads and stores packs of 8 neighbouring elements (16 bytes of
// bfloat16), or single elements if a matrix is not aligned for packs. Arithmetic is in float32 for any storage type.
#pragma once

#include "kernels/base/cuda.cuh"

namespace streambp::cuda {

constexpr int kPack = 8;

template <int N>
struct Floats {
  float x[N] = {};
};

template <int N, class T>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Memory {
  T x[N];
};

template <int N, class T>
__device__ Floats<N> load(const T* from) {
  const auto memory = *reinterpret_cast<const Memory<N, T>*>(from);
  Floats<N> result;
  for (int k = 0; k < N; ++k) result.x[k] = static_cast<float>(memory.x[k]);
  return result;
}

template <int N, class T>
__device__ void store(T* to, const Floats<N>& from) {
  Memory<N, T> memory;
  for (int k = 0; k < N; ++k) memory.x[k] = static_cast<T>(from.x[k]);
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(memory) == 16 && sizeof(T) == 2) {  // nvcc would split this into four stores
    const auto words = reinterpret_cast<const std::uint32_t*>(memory.x);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
    return;
  }
#endif
  *reinterpret_cast<Memory<N, T>*>(to) = memory;
}

// As stored in the type T.
template <class T, int N>
__device__ Floats<N> rounded(Floats<N> x) {
  for (float& value : x.x) value = static_cast<float>(static_cast<T>(value));
  return x;
}

// Can packs cover all rows of these matrices?
template <class... T>
bool packable(const Matrix<T>&... m) {
  auto one = [](const auto& m) {
    using Number = std::remove_pointer_t<decltype(m.data)>;
    const bool aligned =
        reinterpret_cast<std::uintptr_t>(m.data) % alignof(Memory<kPack, std::remove_const_t<Number>>) == 0;
    return m.empty() || (aligned && m.cols % kPack == 0 && (m.rows == 1 || m.stride % kPack == 0));
  };
  return (one(m) && ...);
}

constexpr int kThreads = 256;

template <int N, class F>
__global__ void __launch_bounds__(kThreads) packs_kernel(Index rows, Index cols, F f) {
  for (Index i = blockIdx.y; i < rows; i += gridDim.y) {
    const Index j = (static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x) * N;
    if (j < cols) f(std::integral_constant<int, N>{}, i, j);
  }
}

// Calls f(N, i, j) for columns j .. j + N of every row i: N = 8 if packs cover these matrices, else N = 1.
template <class F, class... T>
void for_each_pack(Cuda& dev, Index rows, Index cols, F f, const Matrix<T>&... m) {
  const Index blocks_of_rows = std::min<Index>(rows, 65535);
  if (cols % kPack == 0 && packable(m...)) {
    launch(dev, packs_kernel<kPack, F>, grid_of(ceil_div(cols, kPack * kThreads), blocks_of_rows), kThreads, 0, rows,
           cols, f);
  } else {
    launch(dev, packs_kernel<1, F>, grid_of(ceil_div(cols, kThreads), blocks_of_rows), kThreads, 0, rows, cols, f);
  }
}

// Of equal shape (or empty): if all are contiguous, each becomes one long row.
template <class... T>
void flatten(Matrix<T>&... m) {
  if (((m.empty() || m.contiguous()) && ...)) ((m = m ? m.reshape(m.size()) : m), ...);
}

// The same for matrices of equal shape (or empty ones).
template <class F, class U, class... T>
void for_each_element(Cuda& dev, F f, Matrix<U> first, Matrix<T>... m) {
  flatten(first, m...);
  for_each_pack(dev, first.rows, first.cols, f, first, m...);
}

}  // namespace streambp::cuda
