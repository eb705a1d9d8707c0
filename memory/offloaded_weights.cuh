// Weight offload: keeps a model's weights in an unnamed temporary file while their memory on the device holds other
// weights.
#pragma once

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <vector>

#include "model/parameters.cuh"

namespace streambp {

template <class Device, class T>
class OffloadedWeights {
 public:
  OffloadedWeights(Device& dev, Model<T>& model) : dev_(dev), model_(model), file_(std::tmpfile()) {
    require(file_ != nullptr, "cannot create a temporary file for the weights: ", std::strerror(errno),
            "; set TMPDIR to a directory with enough space");
    for (auto& e : table(model_.config, model_.weights)) {
      const std::vector<T> numbers = to_host(dev_, *e.matrix);
      require(std::fwrite(numbers.data(), sizeof(T), numbers.size(), file_) == numbers.size(),
              "cannot write the weights to a temporary file: ", std::strerror(errno));
    }
  }
  ~OffloadedWeights() {
    if (file_) std::fclose(file_);
  }
  OffloadedWeights(const OffloadedWeights&) = delete;

  // Brings the weights back to the device.
  void restore() {
    std::rewind(file_);
    for (auto& e : table(model_.config, model_.weights)) {
      std::vector<T> numbers(static_cast<std::size_t>(e.matrix->size()));
      require(std::fread(numbers.data(), sizeof(T), numbers.size(), file_) == numbers.size(),
              "cannot read the weights back from their temporary file: ", std::strerror(errno));
      dev_.upload(*e.matrix, numbers.data());
    }
  }

 private:
  Device& dev_;
  Model<T>& model_;
  FILE* file_;
};

}  // namespace streambp
