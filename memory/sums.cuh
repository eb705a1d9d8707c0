// Gradient sums: the gradient of one section of the parameter table (a layer, the head, the embedding), accumulated
// over chunks of rows.
#pragma once

#include <utility>

#include "kernels/elementwise.cuh"
#include "model/parameters.cuh"

namespace streambp {

// The section's gradient tensors are allocated and zeroed on first use. Sums are kept in float32 at least: if the
// gradient has a narrower type, chunks add to float32 sums, and finish() adds these to the gradient. Otherwise the sums
// are the gradient.
template <class Device, class Gradient, class Section, class TableOf>
class Sums {
 public:
  Sums(Device& dev, Gradient& gradient, Section section, TableOf table_of)
      : dev(dev),
        scope(dev.scope()),
        gradient(table_of(gradient)),
        section(std::move(section)),
        sums(table_of(this->section)) {
    for (std::size_t i = 0; i < sums.size(); ++i) {
      auto& total = *this->gradient[i].matrix;
      if (!total) total = zeros<G>(this->gradient[i].parameter, Kind::gradients, End::top);
      if constexpr (std::is_same_v<G, A>) {
        *sums[i].matrix = total;
      } else {
        *sums[i].matrix = zeros<A>(sums[i].parameter, Kind::sums, End::bottom);
      }
    }
  }
  Sums(const Sums&) = delete;

  // Call when all chunks of this micro-batch have been added.
  void finish() {
    if constexpr (!std::is_same_v<G, A>) {
      for (std::size_t i = 0; i < sums.size(); ++i) add(dev, *gradient[i].matrix, *sums[i].matrix);
    }
  }

  Section* operator->() { return &section; }
  Section& operator*() { return section; }

 private:
  template <class T>
  Matrix<T> zeros(const Parameter& p, Kind kind, End end) {
    const auto matrix = allocate<T>(dev, p.rows, p.cols, kind, end);
    zero(dev, matrix);
    return matrix;
  }

  template <class T>
  static T type_of(const Table<T>&);  // never called; names the type of a table's tensors

  Device& dev;
  decltype(std::declval<Device&>().scope()) scope;
  std::invoke_result_t<TableOf, Gradient&> gradient;
  Section section;
  std::invoke_result_t<TableOf, Section&> sums;
  using G = decltype(type_of(gradient));
  using A = decltype(type_of(sums));
};

}  // namespace streambp
