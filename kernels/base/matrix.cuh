// A view of a row-major matrix, the only tensor type of the program. It does not own memory; devices do.
//
// A Matrix is sliced by rows (a chunk of the token stream) or by columns (the heads of an attention layer). A vector,
// such as a bias, is a matrix of one row. Data is null on the Plan device. A parameter that a model lacks is an empty
// matrix.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "kernels/base/error.h"

namespace streambp {

using Index = std::int64_t;

// The unit of work along the token stream. Every operation computes rows in tiles that start at multiples of kTile, and
// every sum over rows adds tiles from last to first. So results do not depend on the chunk.
constexpr Index kTile = 256;

// The GPU sums weight gradients over larger tiles: reading and writing a gradient takes as long as multiplying about
// 700 rows on an H100. 2048 rows of an 8B model's activations take 0.4 GB.
constexpr Index kGpuTile = 2048;

// A sum over the rows of a tile first sums groups of this many rows, then adds the groups from last to first.
constexpr Index kGroup = 16;
static_assert(kTile % kGroup == 0);

// constexpr functions also run in CUDA kernels. There, std::min and std::max cannot take a constant by reference.
constexpr Index ceil_div(Index a, Index b) { return (a + b - 1) / b; }
constexpr Index round_up(Index a, Index b) { return ceil_div(a, b) * b; }
constexpr Index least(Index a, Index b) { return a < b ? a : b; }
constexpr Index most(Index a, Index b) { return a < b ? b : a; }

// Whether an operation overwrites its output (y = ...) or adds to it (y += ...).
enum class Update { assign, add };

// A half-open range of rows of the token stream.
struct Rows {
  Index begin, end;
  constexpr Index size() const { return end - begin; }
  constexpr Rows relative_to(Rows whole) const { return {begin - whole.begin, end - whole.begin}; }
};

// The i-th block of `size` out of n elements; the last block may be smaller.
constexpr Rows piece(Index i, Index size, Index n) { return {i * size, least(n, (i + 1) * size)}; }

// A sum over the rows of a stream can be divided among lanes (memory/sums.h). Its matrix then holds one sum for each
// lane, one below the other, and tile t of the rows adds to the sum of lane t mod lanes. Calls f(lane, rows) for the tiles,
// last to first. One lane has all rows.
template <class F>
void for_each_tile_of_lanes(Index lanes, Index rows, Index tile, F&& f) {
  if (lanes == 1) return f(Index{0}, Rows{0, rows});
  for (Index t = ceil_div(rows, tile) - 1; t >= 0; --t) f(t % lanes, piece(t, tile, rows));
}

template <class T>
struct Matrix {
  T* data = nullptr;
  Index rows = 0, cols = 0;
  Index stride = 0;  // elements from one row to the next

  Matrix() = default;
  constexpr Matrix(T* data, Index rows, Index cols) : data(data), rows(rows), cols(cols), stride(cols) {}
  constexpr Matrix(T* data, Index rows, Index cols, Index stride)
      : data(data), rows(rows), cols(cols), stride(stride) {}
  // Matrix<T> converts to Matrix<const T>.
  template <class U>
  requires(std::is_same_v<const U, T>) constexpr Matrix(const Matrix<U>& m)
      : data(m.data), rows(m.rows), cols(m.cols), stride(m.stride) {}

  constexpr bool empty() const { return rows == 0 || cols == 0; }
  constexpr explicit operator bool() const { return !empty(); }
  constexpr Index size() const { return rows * cols; }
  constexpr bool contiguous() const { return stride == cols || rows == 1; }
  constexpr T* row(Index i) const { return data + i * stride; }
  constexpr T& operator()(Index i, Index j) const { return data[i * stride + j]; }

  Matrix slice(Rows r) const {
    require(0 <= r.begin && r.begin <= r.end && r.end <= rows, "rows ", r.begin, "..", r.end, " of ", rows);
    return {data ? row(r.begin) : nullptr, r.size(), cols, stride};
  }
  Matrix columns(Index begin, Index count) const {
    require(0 <= begin && count >= 0 && begin + count <= cols, "columns ", begin, "+", count, " of ", cols);
    return {data ? data + begin : nullptr, rows, count, stride};
  }
  Matrix columns(Rows r) const { return columns(r.begin, r.size()); }
  // The sum of one of several lanes, of so many rows each.
  Matrix lane(Index lane, Index rows_of_lane) const { return slice({lane * rows_of_lane, (lane + 1) * rows_of_lane}); }
  // The same elements with another row width: C x (heads * dim) becomes (C * heads) x dim.
  Matrix reshape(Index new_cols) const {
    require(contiguous() && size() % new_cols == 0, "cannot reshape ", rows, "x", cols, " to rows of ", new_cols);
    return {data, size() / new_cols, new_cols};
  }
};

// A read-only operand. T is deduced from the other operands, so that callers can also pass a writable matrix.
template <class T>
using Input = std::type_identity_t<Matrix<const T>>;

// require_shape("matmul", "weight", w, out, in)
template <class T>
void require_shape(const char* operation, const char* what, const Matrix<T>& m, Index rows, Index cols) {
  require(m.rows == rows && m.cols == cols, operation, ": ", what, " is ", m.rows, "x", m.cols, ", expected ", rows,
          "x", cols);
}

// bfloat16: the upper half of a float32. Sums are in float32. Assigning a float32 to an element
// rounds it. Compilers vectorise that, but not the copy of a temporary.
struct BFloat16 {
  std::uint16_t bits;

  BFloat16() = default;
  constexpr explicit BFloat16(float x) { *this = x; }
  constexpr BFloat16& operator=(float x) {  // round to nearest, ties to even
#ifdef __CUDA_ARCH__
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return *this;
#endif
    const auto b = std::bit_cast<std::uint32_t>(x);
    const bool nan = (b & 0x7fffffffu) > 0x7f800000u;
    bits = static_cast<std::uint16_t>(nan ? (b >> 16) | 0x40u : (b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
    return *this;
  }
  constexpr operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};

// IEEE half precision, for storage only: 1 sign bit, 5 exponent bits, 10 fraction bits.
struct Float16 {
  std::uint16_t bits;
  constexpr operator float() const {
    const std::uint32_t sign = bits >> 15, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 0) return (sign ? -0x1p-24f : 0x1p-24f) * static_cast<float>(fraction);
    const std::uint32_t widened = exponent == 31 ? 255 : exponent + 127 - 15;  // 31: infinity and NaN
    return std::bit_cast<float>(sign << 31 | widened << 23 | fraction << 13);
  }

  Float16() = default;
  constexpr explicit Float16(float x) {  // to nearest, ties to even; overflow gives infinity
    const auto b = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t sign = b >> 16 & 0x8000u, magnitude = b & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
      bits = static_cast<std::uint16_t>(sign | 0x7e00u);  // NaN
    } else if (magnitude < 0x38800000u) {  // below 2^-14: added to 1/2, its last 24 bits are multiples of 2^-24
      const float steps = std::bit_cast<float>(magnitude) + 0.5f;
      bits = static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(steps) - 0x3f000000u));
    } else {
      const std::uint32_t rounded = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
      bits = static_cast<std::uint16_t>(sign | (rounded < 0x7c00u ? rounded : 0x7c00u));
    }
  }
};

// The version of the arithmetic in bfloat16: results of another one have other bits. 2: products in pairs (gemm.h),
// logits in float32.
constexpr Index kBFloat16Version = 2;

// The type of sums over many terms: at least float32.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, BFloat16>, float, T>;

}  // namespace streambp
