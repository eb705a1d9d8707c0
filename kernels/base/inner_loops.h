// The loops in which the program spends most of its time: matrix products (gemm.h) and the softmax of attention. Their
// files, products.cpp, few_rows.cpp and softmax_rows.cpp, are compiled once for each instruction set, in a namespace named
// after it, and inner_loops.cpp takes the best one that the processor has. All of them compute the same bits.
//
// What is compiled for new processors may not run on old ones. But the linker keeps one copy of a template or inline
// function, perhaps that of a file like these. So these files call none that is defined elsewhere, unless it is always
// inlined or takes one of their lambdas: no containers, and no slice(), which checks and throws. Their callers check
// operands and own memory. A test looks at the symbols.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "kernels/base/gemm.h"

namespace streambp::cpu {

// The scores of a query for a tile of keys, of which it attends to the visible ones.
template <class A>
struct ScoreRow {
  A* scores;
  Index keys;
  Rows visible;
  A scale, cap;  // cap: 0 if there is none
};

// The maximum of the scores of a row so far, and their Σ exp(score - maximum).
template <class A>
struct RunningSoftmax {
  A maximum = -INFINITY, sum = 0;
};

template <class T>
struct InnerLoops {
  using A = Accumulator<T>;
  void (*copy_left)(A* block, Matrix<const T> m, Op op);
  void (*pack_right)(A* panels, Matrix<const T> b, Op op);
  // c = op(a) b or c += op(a) b, for operands that the functions above have copied
  void (*multiply)(Matrix<A> c, const A* block, Op op, const A* panels, Index inner, Update update);
  // y += x op(w). scratch: for 2 kFewRows rows of x. If op is as_is, y has a multiple of kMostLanes columns
  void (*multiply_few_rows)(Matrix<A> y, Matrix<const T> x, Matrix<const T> w, Op op, A* scratch);
  // S becomes P = exp(scale S - maximum), and 0 where it is not visible. If the maximum rises, the output so far, of dim
  // numbers, is rescaled. rounded: P in the type T, or P itself.
  void (*softmax_row)(const ScoreRow<A>& row, RunningSoftmax<A>& running, A* output, Index dim, T* rounded);
  // S becomes P = exp(scale S - lse), and dP becomes dS = scale P (dP - delta).
  void (*softmax_backward_row)(const ScoreRow<A>& row, A* ds, A lse, A delta, T* rounded_p, T* rounded_ds);
};

// Of any instruction set
constexpr Index kMostPanelBytes = 256, kMostLanes = 16;

namespace avx2 {
template <class T>
InnerLoops<T> inner_loops();
}
namespace avx512 {
template <class T>
InnerLoops<T> inner_loops();
}
namespace avx512bf16 {
template <class T>
InnerLoops<T> inner_loops();
bool multiplies_pairs();
}  // namespace avx512bf16
namespace neon {
template <class T>
InnerLoops<T> inner_loops();
}

// The loops of the instruction set in use
template <class T>
const InnerLoops<T>& inner_loops();

// The instruction sets of this processor for which the loops are compiled. The last one is the best, and is used unless a
// test chooses another one.
std::vector<std::string> instruction_sets();
void use_instructions(const std::string& name);

}  // namespace streambp::cpu
