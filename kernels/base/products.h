// The inner loops of the products in gemm.h. products.cpp and few_rows.cpp are compiled once for each instruction set,
// in a namespace of its name; gemm.cpp takes the best one that the processor has. All of them compute the same bits.
//
// What is compiled for new processors may not run on old ones. But the linker keeps one copy of a template or inline
// function, whoever compiled it. So these files call none that is defined elsewhere, unless it is always inlined: no
// containers, and no slice(), which checks and throws. gemm.cpp checks operands and owns memory. A test looks at the
// symbols.
#pragma once

#include "kernels/base/gemm.h"

namespace streambp::cpu {

template <class T>
struct Products {
  using A = Accumulator<T>;
  void (*copy_left)(A* block, Matrix<const T> m, Op op);
  void (*pack_right)(A* panels, Matrix<const T> b, Op op);
  // c = op(a) b or c += op(a) b, for operands that the functions above have copied
  void (*multiply)(Matrix<A> c, const A* block, Op op, const A* panels, Index inner, Update update);
  // y += x op(w). scratch: for 2 kFewRows rows of x. If op is as_is, y has a multiple of kMostLanes columns
  void (*multiply_few_rows)(Matrix<A> y, Matrix<const T> x, Matrix<const T> w, Op op, A* scratch);
};

// Of any instruction set
constexpr Index kMostPanelBytes = 256, kMostLanes = 16;

namespace avx2 {
template <class T>
Products<T> products();
}
namespace avx512 {
template <class T>
Products<T> products();
}
namespace avx512bf16 {
template <class T>
Products<T> products();
bool multiplies_pairs();
}  // namespace avx512bf16
namespace neon {
template <class T>
Products<T> products();
}

}  // namespace streambp::cpu
