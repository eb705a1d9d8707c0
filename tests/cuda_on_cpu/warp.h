// Operations of a warp (shuffles and votes), and the meaning of the kernels' inline assembly.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "multiprocessor.h"

namespace cuda_on_cpu {

inline void meet_all(const Meeting& meeting, unsigned mask, void* operand) {
  Multiprocessor& m = here();
  if (mask != 0xffffffff)
    m.fail("thread ", m.running().number, ": ", meeting.name, " with another mask than 0xffffffff");
  m.meet(meeting, operand);
}

inline int lane() { return here().running().number % Multiprocessor::kWarp; }

struct Shuffled {
  std::uint64_t value, result;
  int source;
};
inline void shuffle(void* const* operands, int lanes) {
  for (int i = 0; i < lanes; ++i) {
    auto& mine = *static_cast<Shuffled*>(operands[i]);
    mine.result = mine.source < lanes ? static_cast<Shuffled*>(operands[mine.source])->value : ~std::uint64_t{0};
  }
}
inline constexpr Meeting kShuffle{"__shfl_sync", shuffle}, kShuffleUp{"__shfl_up_sync", shuffle},
    kShuffleDown{"__shfl_down_sync", shuffle}, kShuffleXor{"__shfl_xor_sync", shuffle};

template <class T>
T shuffled(const Meeting& meeting, unsigned mask, T value, int source) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  Shuffled operand{0, 0, source};
  std::memcpy(&operand.value, &value, sizeof(T));
  meet_all(meeting, mask, &operand);
  std::memcpy(&value, &operand.result, sizeof(T));
  return value;
}

inline void vote(void* const* operands, int lanes) {
  unsigned ballot = 0;
  for (int i = 0; i < lanes; ++i) ballot |= (*static_cast<unsigned*>(operands[i]) ? 1u : 0u) << i;
  for (int i = 0; i < lanes; ++i) *static_cast<unsigned*>(operands[i]) = ballot;
}
inline void vote_all(void* const* operands, int lanes) {
  bool all = true;
  for (int i = 0; i < lanes; ++i) all = all && *static_cast<unsigned*>(operands[i]);
  for (int i = 0; i < lanes; ++i) *static_cast<unsigned*>(operands[i]) = all;
}
inline constexpr Meeting kSyncWarp{"__syncwarp"}, kBallot{"__ballot_sync", vote}, kAny{"__any_sync", vote},
    kAll{"__all_sync", vote_all};

inline unsigned voted(const Meeting& meeting, unsigned mask, int predicate) {
  unsigned operand = predicate != 0;
  meet_all(meeting, mask, &operand);
  return operand;
}

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::here().barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffff) { cuda_on_cpu::meet_all(cuda_on_cpu::kSyncWarp, mask, nullptr); }

// The lanes of a warp exchange values within sections of `width` lanes. A lane with a source outside its section keeps
// its value; a lane that does not exist sends NaN.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize) {
  const int begin = cuda_on_cpu::lane() & ~(width - 1);
  return cuda_on_cpu::shuffled(cuda_on_cpu::kShuffle, mask, value, begin | (source & (width - 1)));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
  const int lane = cuda_on_cpu::lane(), source = lane - static_cast<int>(delta);
  return cuda_on_cpu::shuffled(cuda_on_cpu::kShuffleUp, mask, value, source < (lane & ~(width - 1)) ? lane : source);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
  const int lane = cuda_on_cpu::lane(), source = lane + static_cast<int>(delta);
  return cuda_on_cpu::shuffled(cuda_on_cpu::kShuffleDown, mask, value, source > (lane | (width - 1)) ? lane : source);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize) {
  const int lane = cuda_on_cpu::lane(), source = lane ^ bits;
  return cuda_on_cpu::shuffled(cuda_on_cpu::kShuffleXor, mask, value, source > (lane | (width - 1)) ? lane : source);
}

inline int __any_sync(unsigned mask, int predicate) {
  return cuda_on_cpu::voted(cuda_on_cpu::kAny, mask, predicate) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return cuda_on_cpu::voted(cuda_on_cpu::kAll, mask, predicate) != 0;
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return cuda_on_cpu::voted(cuda_on_cpu::kBallot, mask, predicate);
}

inline int __popc(unsigned bits) { return std::popcount(bits); }

// ---- The meaning of the kernels' inline assembly ----------------------------------------------------------------

namespace cuda_on_cpu {

inline float low_bf16(std::uint32_t pair) { return std::bit_cast<float>(pair << 16); }
inline float high_bf16(std::uint32_t pair) { return std::bit_cast<float>(pair & 0xffff0000u); }

inline std::uint32_t round_to_bf16(float x) {  // to the nearest, ties to even
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

struct MmaOperand {
  float* d;
  const std::uint32_t *a, *b;
};

// D += A B for A of 16 x 16 and B of 16 x 8. With g = lane / 4 and t = lane % 4 a lane holds
//   of A: rows g and g + 8, columns 2t, 2t + 1 (a[0], a[1]) and 2t + 8, 2t + 9 (a[2], a[3]);
//   of B: column g, rows 2t, 2t + 1 (b[0]) and 2t + 8, 2t + 9 (b[1]);
//   of D: row g (d[0], d[1]) and row g + 8 (d[2], d[3]), columns 2t, 2t + 1.
inline void multiply_fragments(void* const* operands, int) {
  using Four = float __attribute__((vector_size(16)));  // a vector that every processor has
  float a[16][16];
  Four b[16][2], d[16][2];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const MmaOperand*>(operands[lane]);
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      a[g + i % 2 * 8][t + i / 2 * 8] = low_bf16(mine.a[i]);
      a[g + i % 2 * 8][t + i / 2 * 8 + 1] = high_bf16(mine.a[i]);
      d[g + i / 2 * 8][t / 4][t % 4 + i % 2] = mine.d[i];
    }
    for (int i = 0; i < 2; ++i) {
      b[t + i * 8][g / 4][g % 4] = low_bf16(mine.b[i]);
      b[t + i * 8 + 1][g / 4][g % 4] = high_bf16(mine.b[i]);
    }
  }
  for (int i = 0; i < 16; ++i) {
    Four left = d[i][0], right = d[i][1];
    for (int k = 0; k < 16; ++k) {
      left += a[i][k] * b[k][0];
      right += a[i][k] * b[k][1];
    }
    d[i][0] = left, d[i][1] = right;
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* mine = static_cast<const MmaOperand*>(operands[lane])->d;
    for (int i = 0; i < 4; ++i) mine[i] = d[lane / 4 + i / 2 * 8][lane % 4 / 2][lane % 2 * 2 + i % 2];
  }
}
inline constexpr Meeting kMma{"mma_m16n8k16", multiply_fragments, true};

struct LdmatrixOperand {
  std::uint32_t* r;
  const void* row;
};

// Lane l passes the address of row l % 8 of matrix l / 8. As r[m] it receives row l / 4, columns 2 (l % 4) and
// 2 (l % 4) + 1 of matrix m; transposed, with rows and columns exchanged.
template <bool kTransposed>
void load_matrices(void* const* operands, int) {
  std::uint16_t rows[32][8];
  for (int lane = 0; lane < 32; ++lane)
    std::memcpy(rows[lane], static_cast<const LdmatrixOperand*>(operands[lane])->row, 16);
  for (int lane = 0; lane < 32; ++lane) {
    for (int m = 0; m < 4; ++m) {
      const int i = lane / 4, j = lane % 4 * 2;
      const std::uint32_t low = kTransposed ? rows[8 * m + j][i] : rows[8 * m + i][j];
      const std::uint32_t high = kTransposed ? rows[8 * m + j + 1][i] : rows[8 * m + i][j + 1];
      static_cast<const LdmatrixOperand*>(operands[lane])->r[m] = low | high << 16;
    }
  }
}
inline constexpr Meeting kLdmatrix{"ldmatrix_x4", load_matrices<false>, true};
inline constexpr Meeting kLdmatrixTrans{"ldmatrix_x4_trans", load_matrices<true>, true};

inline void load_matrix(const Meeting& meeting, std::uint32_t* r, const void* row) {
  Multiprocessor& m = here();
  m.check_shared(meeting.name, row);
  LdmatrixOperand operand{r, row};
  m.meet(meeting, &operand);
}

// Completes the thread's copies, except those of its latest `recent` groups.
inline void finish_copies(int recent) {
  Multiprocessor::Thread& me = here().running();
  const auto end = std::find_if(me.copies.begin(), me.copies.end(),
                                [&](const auto& copy) { return copy.group >= me.groups - recent; });
  for (auto copy = me.copies.begin(); copy != end; ++copy) {
    if (copy->global)
      std::memcpy(copy->shared, copy->global, 16);
    else
      std::memset(copy->shared, 0, 16);
  }
  me.copies.erase(me.copies.begin(), end);
}

}  // namespace cuda_on_cpu

namespace streambp::ptx {

inline void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  cuda_on_cpu::MmaOperand operand{d, a, b};
  cuda_on_cpu::here().meet(cuda_on_cpu::kMma, &operand);
}
inline void ldmatrix_x4(std::uint32_t (&r)[4], const void* row) {
  cuda_on_cpu::load_matrix(cuda_on_cpu::kLdmatrix, r, row);
}
inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], const void* row) {
  cuda_on_cpu::load_matrix(cuda_on_cpu::kLdmatrixTrans, r, row);
}

// The hardware copies at any time between here and the wait. Overwriting the target now exposes readers of the old
// contents; copying at the wait exposes readers that do not wait.
inline void cp_async_16(void* shared, const void* global, bool valid) {
  cuda_on_cpu::Multiprocessor& m = cuda_on_cpu::here();
  m.check_shared("cp_async_16", shared);
  if (reinterpret_cast<std::uintptr_t>(global) % 16 != 0)
    m.fail("thread ", m.running().number, ": cp_async_16 needs a global address aligned to 16 bytes");
  std::memset(shared, 0xff, 16);
  auto& me = m.running();
  me.copies.push_back({static_cast<char*>(shared), valid ? static_cast<const char*>(global) : nullptr, me.groups});
}
inline void cp_async_commit() { ++cuda_on_cpu::here().running().groups; }
template <int N>
void cp_async_wait() {
  cuda_on_cpu::finish_copies(N);
}

inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline std::uint32_t pack_bf16(float low, float high) {
  return cuda_on_cpu::round_to_bf16(low) | cuda_on_cpu::round_to_bf16(high) << 16;
}

}  // namespace streambp::ptx
