// Shared by the tests of the referee: files of recorded steps and gradients.
#pragma once

#include "data/files/safetensors.h"

namespace streambp {

// A file of tensors: of a step, or of a gradient.
class TensorFile {
 public:
  explicit TensorFile(const fs::path& path, const std::map<std::string, std::string>& metadata = {})
      : writer_(path, metadata) {}

  template <class V>
  TensorFile& add(const std::string& name, const std::vector<V>& values, std::vector<Index> shape = {-1}) {
    if (shape == std::vector<Index>{-1}) shape = {std::ssize(values)};  // by default a row
    const char* type = sizeof(V) == 8 ? (std::is_integral_v<V> ? "I64" : "F64") : "I32";
    std::string bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(V));
    writer_.add(name, type, shape, [bytes](std::ostream& out) { out << bytes; });
    return *this;
  }
  void write() { writer_.finish(); }

 private:
  SafetensorsWriter writer_;
};

}  // namespace streambp
