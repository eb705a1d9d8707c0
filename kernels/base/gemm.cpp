#include "kernels/base/gemm.h"

#include "kernels/base/products.h"

namespace streambp::cpu {
namespace {

// The same functions for each type. Of one instruction set, except that bfloat16 may have a better one.
struct InstructionSet {
  const char* name;
  Products<float> f32;
  Products<double> f64;
  Products<BFloat16> bf16;
};

std::vector<InstructionSet> usable_instructions() {
#ifdef __x86_64__
  std::vector<InstructionSet> sets = {
      {"AVX2", avx2::products<float>(), avx2::products<double>(), avx2::products<BFloat16>()}};
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    using namespace avx512;
    sets.push_back({"AVX-512", products<float>(), products<double>(), products<BFloat16>()});
    if (__builtin_cpu_supports("avx512bf16") && avx512bf16::multiplies_pairs())
      sets.push_back({"AVX512_BF16", products<float>(), products<double>(), avx512bf16::products<BFloat16>()});
  }
  return sets;
#else
  return {{"NEON", neon::products<float>(), neon::products<double>(), neon::products<BFloat16>()}};
#endif
}

const std::vector<InstructionSet>& usable() {
  static const std::vector<InstructionSet> sets = usable_instructions();
  return sets;
}
const InstructionSet*& used() {
  static const InstructionSet* best = &usable().back();
  return best;
}

template <class T>
const Products<T>& chosen() {
  if constexpr (std::is_same_v<T, BFloat16>) return used()->bf16;
  if constexpr (std::is_same_v<T, float>) return used()->f32;
  if constexpr (std::is_same_v<T, double>) return used()->f64;
}

}  // namespace

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const InstructionSet& set : usable()) names.push_back(set.name);
  return names;
}

void use_instructions(const std::string& name) {
  for (const InstructionSet& set : usable()) {
    if (name == set.name) return static_cast<void>(used() = &set);
  }
  fail("this processor has no instructions named ", quote(name), "; it has ", join(instruction_sets()));
}

// --- Operands ---

template <class T>
Left<T> LeftBlock<T>::copy(Matrix<const T> m, Op op) const {
  require(m.rows <= kBlock && m.cols <= kBlock, "a block of ", m.rows, "x", m.cols, " is too large");
  chosen<T>().copy_left(memory_.data(), m, op);
  return {memory_.data(), op, op == Op::as_is ? m.rows : m.cols, op == Op::as_is ? m.cols : m.rows};
}

template <class T>
Left<T> Left<T>::slice(Rows some) const {
  require(0 <= some.begin && some.begin <= some.end && some.end <= rows, "gemm: rows outside the operand");
  return {data + some.begin * (op == Op::as_is ? LeftBlock<T>::kStride : 1), op, some.size(), inner};
}

template <class T>
RightPanels<T>::RightPanels(Index most_cols)
    : most_cols_(most_cols), memory_(kBlock * round_up(most_cols, kMostPanelBytes / sizeof(Accumulator<T>))) {}

template <class T>
void RightPanels<T>::pack(Matrix<const T> b, Op op) {
  rows = op == Op::as_is ? b.rows : b.cols;
  cols = op == Op::as_is ? b.cols : b.rows;
  require(rows <= kBlock && cols <= most_cols_, "panels of ", rows, "x", cols, " are too large");
  chosen<T>().pack_right(memory_.data(), b, op);
}

// --- Products ---

constexpr Index kPackedColumns = 128;  // of b, in some panels

template <class T>
void multiply(Matrix<Accumulator<T>> c, const Left<T>& a, const RightPanels<T>& b, Update update) {
  require(c.rows == a.rows && c.cols == b.cols && a.inner == b.rows, "gemm: the operands do not fit together");
  chosen<T>().multiply(c, a.data, a.op, b.data(), b.rows, update);
}

template <class T>
void gemm(Matrix<Accumulator<T>> c, Matrix<const T> a, Op op_a, Matrix<const T> b, Op op_b) {
  thread_local LeftBlock<T> left_block;
  thread_local RightPanels<T> right(kPackedColumns);
  const Index inner = op_a == Op::as_is ? a.cols : a.rows;
  for (Index block = 0; block < ceil_div(inner, kBlock); ++block) {
    const Rows k = piece(block, kBlock, inner);
    const Left<T> left = left_block.copy(op_a == Op::as_is ? a.columns(k) : a.slice(k), op_a);
    const Matrix<const T> b_rows = op_b == Op::as_is ? b.slice(k) : b.columns(k);
    for (Index j = 0; j < c.cols; j += kPackedColumns) {
      const Rows cols = {j, least(j + kPackedColumns, c.cols)};
      right.pack(op_b == Op::as_is ? b_rows.columns(cols) : b_rows.slice(cols), op_b);
      multiply<T>(c.columns(cols), left, right, Update::add);
    }
  }
}

template <class T>
void multiply_few_rows(Matrix<Accumulator<T>> y, Matrix<const T> x, Matrix<const T> w, Op op) {
  const auto [inner, cols] = op == Op::as_is ? std::pair(w.rows, w.cols) : std::pair(w.cols, w.rows);
  require(x.rows <= kFewRows && y.rows == x.rows && y.cols == cols && x.cols == inner,
          "product of few rows: the operands do not fit together");
  if (op == Op::as_is && cols % kMostLanes != 0) return gemm<T>(y, x, Op::as_is, w, op);
  if (y.empty()) return;
  thread_local std::vector<Accumulator<T>> scratch;
  const auto size = static_cast<std::size_t>(2 * kFewRows * round_up(x.cols, 2));
  if (scratch.size() < size) scratch.resize(size);
  chosen<T>().multiply_few_rows(y, x, w, op, scratch.data());
}

#define STREAMBP_PRODUCTS(T)                                                                     \
  template struct Left<T>;                                                                       \
  template class LeftBlock<T>;                                                                   \
  template class RightPanels<T>;                                                                 \
  template void multiply(Matrix<Accumulator<T>>, const Left<T>&, const RightPanels<T>&, Update); \
  template void gemm(Matrix<Accumulator<T>>, Matrix<const T>, Op, Matrix<const T>, Op);          \
  template void multiply_few_rows(Matrix<Accumulator<T>>, Matrix<const T>, Matrix<const T>, Op);

STREAMBP_PRODUCTS(float)
STREAMBP_PRODUCTS(double)
STREAMBP_PRODUCTS(BFloat16)

}  // namespace streambp::cpu
