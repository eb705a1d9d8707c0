// Weight offload: keeps a model's weights in an unnamed temporary file while their memory on the device holds other
// weights.
#pragma once

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/base/temporary_file.cuh"
#include "model/parameters.cuh"

namespace streambp {

// While it lives, the model has no adapters.
template <class T>
class AdaptersOff {
 public:
  explicit AdaptersOff(Model<T>& model)
      : model_(model), weights_(model.weights), sizes_(std::exchange(model.config.adapters, {})) {
    for (Layer<T>& layer : model.weights.layers) {
      for (Linear<T>* w : layer.linears()) w->adapter = {};
    }
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
  OffloadedWeights(Device& dev, Model<T>& model) : dev_(dev), model_(model), file_(temporary_file()) {
    auto check = [](bool written) {
      require(written, "cannot write the weights to a temporary file: ", std::strerror(errno), kRemedy);
    };
    for (auto& e : table(model_.config, model_.weights)) {
      const std::vector<T> numbers = e.with_matrix([&](auto m) { return to_host(dev_, m); });
      check(std::fwrite(numbers.data(), sizeof(T), numbers.size(), file_.get()) == numbers.size());
    }
    check(std::fflush(file_.get()) == 0);  // before other weights replace those on the device
  }

  // Brings the weights back to the device.
  void restore() {
    std::rewind(file_.get());
    for (auto& e : table(model_.config, model_.weights)) {
      e.with_matrix([&](auto m) {
        std::vector<T> numbers(static_cast<std::size_t>(m.size()));
        require(std::fread(numbers.data(), sizeof(T), numbers.size(), file_.get()) == numbers.size(),
                "cannot read the weights back from their temporary file: ", std::strerror(errno));
        dev_.upload(m, numbers.data());
      });
    }
  }

 private:
  struct Close {
    void operator()(FILE* file) const { std::fclose(file); }
  };
  using File = std::unique_ptr<FILE, Close>;

  static constexpr const char* kRemedy = "; set TMPDIR to a directory with enough space";

  static File temporary_file() {
    Descriptor descriptor;
    open_temporary_file(descriptor, temporary_directory());
    File file(fdopen(descriptor.file, "w+b"));
    require(file != nullptr, "cannot open the temporary file for the weights: ", std::strerror(errno));
    descriptor.file = -1;  // the FILE owns it now
    return file;
  }

  Device& dev_;
  Model<T>& model_;
  File file_;
};

}  // namespace streambp
