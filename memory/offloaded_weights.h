// Weight offload: keeps a model's weights in an unnamed temporary file while their memory on the device holds other
// weights.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "kernels/base/system.h"
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
    open_temporary_file(file_, temporary_directory());
    for (auto& e : table(model_.config, model_.weights))
      e.with_matrix([&](auto m) { transfer("write", ::write, to_host(dev_, m)); });
  }

  // Brings the weights back to the device.
  void restore() {
    lseek(file_.file, 0, SEEK_SET);
    for (auto& e : table(model_.config, model_.weights)) {
      e.with_matrix([&](auto m) {
        std::vector<T> numbers(static_cast<std::size_t>(m.size()));
        dev_.upload(m, transfer("read", ::read, std::move(numbers)).data());
      });
    }
  }

 private:
  template <class F>
  std::vector<T> transfer(const char* what, F&& write_or_read, std::vector<T> numbers) {
    auto* const bytes = reinterpret_cast<std::byte*>(numbers.data());
    for (std::size_t done = 0; done < numbers.size() * sizeof(T);) {
      const ssize_t n = write_or_read(file_.file, bytes + done, numbers.size() * sizeof(T) - done);
      require(n > 0 || (n < 0 && errno == EINTR), "cannot ", what,
              " weights in a temporary file: ", std::strerror(errno), "; set TMPDIR to a directory with enough space");
      done += static_cast<std::size_t>(std::max<ssize_t>(n, 0));
    }
    return numbers;
  }

  Device& dev_;
  Model<T>& model_;
  Descriptor file_;
};

}  // namespace streambp
