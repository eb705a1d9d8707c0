// The gradient of one section of the table (a layer, the head, the embedding) while chunks of rows add to it.
#pragma once

#include <utility>

#include "kernels/elementwise.cuh"
#include "model/parameters.cuh"

namespace streambp {

// The section's gradient tensors are allocated here, as zeros, if they do not exist yet. Sums want float32 at least:
// where the gradient is kept in a narrower type, they live in a section of their own for the time being and are added
// to the gradient at the end; otherwise they are the gradient itself.
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
      auto& born = *this->gradient[i].matrix;
      if (!born) born = zeros<G>(this->gradient[i].parameter, Kind::gradients, End::top);
      if constexpr (std::is_same_v<G, A>) {
        *sums[i].matrix = born;
      } else {
        *sums[i].matrix = zeros<A>(sums[i].parameter, Kind::sums, End::bottom);
      }
    }
  }
  ~Sums() {
    if constexpr (!std::is_same_v<G, A>) {
      for (std::size_t i = 0; i < sums.size(); ++i) add(dev, *gradient[i].matrix, *sums[i].matrix);
    }
  }
  Sums(const Sums&) = delete;

  Section* operator->() { return &section; }
  Section& operator*() { return section; }

 private:
  template <class T>
  Matrix<T> zeros(const Parameter& p, Kind kind, End end) {
    const auto matrix = dev.template allocate<T>(p.rows, p.cols, kind, end);
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
