// Weights as GGUF files store them: a row is cut into blocks of 32 or 256 numbers with a few bits each; a run of 16 or 32
// numbers of a block has a scale, and in some types an offset.
//
//   w[j] = scale code[j] + offset
//
//   type     block  bytes   code                    scale      offset
//   Q8_0        32     34   8 bits, signed          d
//   Q4_0        32     18   4 bits, less 8          d
//   Q4_1        32     20   4 bits                  d          m
//   Q5_0        32     22   5 bits, less 16         d
//   Q5_1        32     24   5 bits                  d          m
//   Q4_K       256    144   4 bits                  d s        -(m t)       s, t: 6 bits, of 32 numbers
//   Q5_K       256    176   5 bits                  d s        -(m t)
//   Q6_K       256    210   6 bits, less 32         d s                     s: 8 bits, signed, of 16 numbers
//   MXFP4       32     17   a number of 4 bits      2^(e-127)
//
// d and m are float16. Every operation is rounded to float32, so w has the bits of llama.cpp's own dequantisation.
#pragma once

#include "kernels/base/math.cuh"
#include "kernels/base/matrix.cuh"

namespace streambp {

enum class BlockType : std::uint8_t { none, f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, mxfp4 };

struct BlockSize {
  int log_weights, bytes;
  constexpr int weights() const { return 1 << log_weights; }
};
constexpr BlockSize size_of_block(BlockType type) {
  constexpr BlockSize sizes[] = {{0, 0},  {0, 4},  {0, 2},   {0, 2},   {5, 34},  {5, 18}, {5, 20},
                                 {5, 22}, {5, 24}, {8, 144}, {8, 176}, {8, 210}, {5, 17}};
  return sizes[static_cast<int>(type)];
}
constexpr Index bytes_of_row(BlockType type, Index weights) {
  return (weights >> size_of_block(type).log_weights) * size_of_block(type).bytes;
}

// Two axes of a list that a file has the other way round: (outer x first x second x inner) is stored as
// (outer x second x first x inner).
struct SwappedAxes {
  Index first = 1, second = 1, inner = 1, begin = 0;  // begin: what is before stays

  explicit operator bool() const { return first > 1 && second > 1; }
  constexpr Index stored(Index i) const {
    if (i < begin) return i;
    const Index a = (i - begin) / (inner * second) % first, b = (i - begin) / inner % second;
    return i + ((b * first + a) - (a * second + b)) * inner;
  }
  constexpr Index original(Index i) const { return SwappedAxes{second, first, inner, begin}.stored(i); }
};

// Two bits of exponent, one of mantissa.
constexpr float mxfp4_value(unsigned code) {
  constexpr float values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};
  return values[code];
}

// Compilers may not fuse these.
constexpr float rounded_product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
constexpr float rounded_sum(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

STREAMBP_INLINE float half_at(const std::uint8_t* bytes) {
  return std::bit_cast<Float16>(static_cast<std::uint16_t>(bytes[0] | bytes[1] << 8));
}
STREAMBP_INLINE std::uint32_t word_at(const std::uint8_t* bytes) {
  return bytes[0] | bytes[1] << 8 | bytes[2] << 16 | static_cast<std::uint32_t>(bytes[3]) << 24;
}

// The scale and the offset of 32 numbers: of the 12 bytes for 8 such runs, the first four have the low 6 bits of scales 0 to
// 3, the next four those of offsets, and the last four the low halves of the others.
STREAMBP_INLINE int scale_of_run(const std::uint8_t* scales, int run, int offset) {
  if (run < 4) return scales[run + 4 * offset] & 63;
  return (scales[run + 4] >> 4 * offset & 15) | (scales[run - 4 + 4 * offset] >> 6 << 4);
}

// Writes numbers j .. j + N of a row, which are in one run.
template <int N>
STREAMBP_INLINE void decode(BlockType type, BlockSize format, const std::uint8_t* row, Index j, float* w) {
  const std::uint8_t* b = row + (j >> format.log_weights) * format.bytes;
  const int at = static_cast<int>(j & ((1 << format.log_weights) - 1)), half = at / 128, in_half = at % 128;
  const auto write = [&](float scale, float offset, auto&& code) {
#pragma omp simd
    for (int i = 0; i < N; ++i) w[i] = rounded_sum(rounded_product(scale, static_cast<float>(code(i))), offset);
  };
  constexpr float none = -0.0f;  // adding it changes no bit
  const auto nibble = [&](const std::uint8_t* bytes, int shift) {
    return [=](int i) { return bytes[i] >> shift & 15; };
  };
  const auto of_32 = nibble(b + format.bytes - 16 + at % 16, at / 16 * 4);
  const auto fifth = [&](const std::uint8_t* bytes) {
    return [=, bits = word_at(bytes) >> at](int i) { return of_32(i) | static_cast<int>(bits >> i & 1) << 4; };
  };
  const auto of_64 = nibble(b + format.bytes - 128 + at / 64 * 32 + at % 32, at / 32 % 2 * 4);
  const auto with_k = [&](auto&& code) {
    write(rounded_product(half_at(b), static_cast<float>(scale_of_run(b + 4, at / 32, 0))),
          -rounded_product(half_at(b + 2), static_cast<float>(scale_of_run(b + 4, at / 32, 1))), code);
  };
  switch (type) {
    case BlockType::none:
      break;
    case BlockType::f32:
      for (int i = 0; i < N; ++i) w[i] = std::bit_cast<float>(word_at(b + 4 * i));
      break;
    case BlockType::f16:
      for (int i = 0; i < N; ++i) w[i] = half_at(b + 2 * i);
      break;
    case BlockType::bf16:
      for (int i = 0; i < N; ++i)
        w[i] = std::bit_cast<float>(static_cast<std::uint32_t>(b[2 * i] | b[2 * i + 1] << 8) << 16);
      break;
    case BlockType::q8_0:
      write(half_at(b), none, [=](int i) { return static_cast<std::int8_t>(b[2 + at + i]); });
      break;
    case BlockType::q4_0:
      write(half_at(b), none, [=](int i) { return of_32(i) - 8; });
      break;
    case BlockType::q4_1:
      write(half_at(b), half_at(b + 2), of_32);
      break;
    case BlockType::q5_0:
      write(half_at(b), none, [c = fifth(b + 2)](int i) { return c(i) - 16; });
      break;
    case BlockType::q5_1:
      write(half_at(b), half_at(b + 2), fifth(b + 4));
      break;
    case BlockType::q4_k:
      with_k(of_64);
      break;
    case BlockType::q5_k:
      with_k([=](int i) { return of_64(i) | (b[16 + at % 32 + i] >> at / 32 & 1) << 4; });
      break;
    case BlockType::q6_k: {
      const auto low = nibble(b + 64 * half + in_half % 64, in_half / 64 * 4);
      const std::uint8_t* high = b + 128 + 32 * half + at % 32;
      const int shift = in_half / 32 * 2, scale = static_cast<std::int8_t>(b[192 + at / 16]);
      write(rounded_product(half_at(b + 208), static_cast<float>(scale)), none,
            [=](int i) { return (low(i) | (high[i] >> shift & 3) << 4) - 32; });
      break;
    }
    case BlockType::mxfp4: {
      const float scale = std::bit_cast<float>(b[0] ? static_cast<std::uint32_t>(b[0]) << 23 : 1u << 22);
      write(scale, none, [=](int i) { return of_32(i) == 8 ? 0 : mxfp4_value(static_cast<unsigned>(of_32(i))); });
      break;
    }
  }
}

// Writes a row, in runs of 16 or 32 numbers, which stay together.
template <BlockType type, class T>
void decode_row(const std::uint8_t* row, Index cols, const SwappedAxes& columns, T* w) {
  constexpr int most = type == BlockType::q4_k || type == BlockType::q5_k ? 32 : 16;
  const auto decode_all = [&]<int N>() {
    for (Index j = 0; j < cols; j += N) {
      float run[N];
      decode<N>(type, size_of_block(type), row, j, run);
      T* to = w + (columns ? columns.original(j) : j);
#pragma omp simd
      for (int k = 0; k < N; ++k) to[k] = run[k];
    }
  };
  const bool runs = cols % most == 0 && (!columns || columns.inner % most == 0);
  runs ? decode_all.template operator()<most>() : decode_all.template operator()<1>();
}
template <class T, int type = static_cast<int>(BlockType::mxfp4)>
void decode_row(BlockType of, const std::uint8_t* row, Index cols, const SwappedAxes& columns, T* w) {
  if (static_cast<int>(of) == type) return decode_row<static_cast<BlockType>(type)>(row, cols, columns, w);
  if constexpr (type > 1) decode_row<T, type - 1>(of, row, cols, columns, w);
}

}  // namespace streambp
