// Weight offload: keeps a model's weights in an unnamed temporary file while their memory on the device holds other
// weights.
#pragma once

#include <optional>
#include <vector>

#include "kernels/base/far_file.h"
#include "model/parameters.h"

namespace streambp {

// While it lives, the model has no adapters.
template <class T>
class AdaptersOff {
 public:
  explicit AdaptersOff(Model<T>& model) : model_(model), weights_(model.weights) {
    for (const Entry<T>& e : adapters(table(model.config, model.weights))) *e.matrix = {};
    sizes_ = std::exchange(model.config.adapters, {});
  }
  ~AdaptersOff() { model_.weights = weights_, model_.config.adapters = std::move(sizes_); }
  AdaptersOff(const AdaptersOff&) = delete;

 private:
  Model<T>& model_;
  const Tensors<T> weights_;
  std::map<std::string, AdapterSize> sizes_;
};

template <class Device, class T>
class OffloadedWeights {
 public:
  OffloadedWeights(Device& dev, Model<T>& model) : dev_(dev), model_(model) {
    file_.emplace(temporary_directory(), for_each_weight([](auto, std::size_t) {}));
    for_each_weight([&]<template <class> class M, class U>(M<U> m, std::size_t offset) {
      const std::vector<U> numbers = to_host(dev_, m);
      file_->wait(file_->start({offset, bytes(m), reinterpret_cast<const std::byte*>(numbers.data()), nullptr}));
    });
  }

  // Brings the weights back to the device.
  void restore() {
    for_each_weight([&]<template <class> class M, class U>(M<U> m, std::size_t offset) {
      std::vector<U> numbers(static_cast<std::size_t>(m.size()));
      file_->wait(file_->start({offset, bytes(m), nullptr, reinterpret_cast<std::byte*>(numbers.data())}));
      dev_.upload(m, numbers.data());
    });
  }

 private:
  template <template <class> class M, class U>
  static std::size_t bytes(const M<U>& m) {
    return static_cast<std::size_t>(m.size()) * sizeof(U);
  }

  // Calls f(weight, its offset in the file). Returns the size of the file.
  template <class F>
  std::size_t for_each_weight(F&& f) {
    std::size_t end = 0;
    for (auto& e : table(model_.config, model_.weights))
      e.with_matrix([&](auto m) { f(m, end), end += (bytes(m) + kFarAlignment - 1) / kFarAlignment * kFarAlignment; });
    return end;
  }

  Device& dev_;
  Model<T>& model_;
  std::optional<FarFile> file_;
};

}  // namespace streambp
