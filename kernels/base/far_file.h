// Far memory of the CPU: a temporary file, which one thread reads and writes while the others compute.
//
// The file bypasses the page cache where the file system allows it (O_DIRECT): the data is read once, so caching it
// would only cost memory and time. Direct access needs aligned memory, so the thread copies through a buffer.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "kernels/base/far.h"

namespace streambp {

// The directory of the file: `named`, or the one for temporary files.
inline fs::path far_directory(const fs::path& named) { return named.empty() ? temporary_directory() : named; }

// Why far memory cannot be in a directory: "is not a directory". Empty if it can.
inline std::string why_not_far(const fs::path& directory) {
  std::error_code error;
  if (!fs::is_directory(directory, error)) return "is not a directory";
  if (access(directory.c_str(), W_OK | X_OK) != 0) return "cannot be written";
  return is_in_memory(directory) ? "is in memory (tmpfs), so it saves none" : "";
}

class FarFile {
 public:
  // Reserves the space, so that a run that starts cannot fill the disk.
  FarFile(const fs::path& directory, std::size_t bytes) : directory_(directory) {
    open_temporary_file(file_, directory);
    reserve(bytes);
    bypass_page_cache(file_.file);
    thread_ = std::thread([this] { run(); });
  }
  ~FarFile() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  FarFile(const FarFile&) = delete;

  // One of `from` and `to` is null.
  struct Copy {
    std::size_t offset, bytes;  // the offset is a multiple of kFarAlignment
    const std::byte* from;      // written to the file
    std::byte* to;              // read from the file
  };

  // Returns the number of the copy.
  std::size_t start(const Copy& copy) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(copy);
    changed_.notify_all();
    return ++started_;
  }
  // Waits until this copy, and so all earlier ones, are done.
  void wait(std::size_t number) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return finished_ >= number; });
    require(error_.empty(), error_);
  }

 private:
  static constexpr std::size_t kBuffer = std::size_t{1} << 20;

  void reserve(std::size_t bytes) {
    bytes = (bytes + kFarAlignment - 1) / kFarAlignment * kFarAlignment;
    const int error = reserve_space(file_.file, bytes);
    require(error == 0, directory_.string(), ": cannot reserve ", ceil_div(static_cast<Index>(bytes), 1 << 20),
            " MiB of far memory here, where ", free_space(file_.file) >> 20, " MiB are free: ", std::strerror(error),
            elsewhere());
  }

  void run() {
    for (std::unique_lock lock(mutex_);;) {
      changed_.wait(lock, [&] { return ended_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const Copy copy = queue_.front();
      queue_.pop_front();
      const bool failed = !error_.empty();
      lock.unlock();
      const int error = failed ? 0 : carry_out(copy);
      lock.lock();
      if (error != 0)
        error_ = directory_.string() + ": cannot " + (copy.to ? "read" : "write") +
                 " far memory here: " + std::strerror(error) + elsewhere();
      ++finished_;
      changed_.notify_all();
    }
  }

  std::string elsewhere() const {
    return directory_ == temporary_directory() ? "; set TMPDIR to a directory on another disk"
                                               : "; name a directory on another disk with --far";
  }

  // Returns the error number, or 0.
  int carry_out(const Copy& copy) const {
    std::byte* const buffer = buffer_.get();
    for (std::size_t done = 0; done < copy.bytes; done += kBuffer) {
      const std::size_t bytes = std::min(kBuffer, copy.bytes - done);
      if (copy.from) std::memcpy(buffer, copy.from + done, bytes);
      const std::size_t whole = (bytes + kFarAlignment - 1) / kFarAlignment * kFarAlignment;
      for (std::size_t i = 0; i < whole;) {
        const auto place = static_cast<off_t>(copy.offset + done + i);
        const ssize_t n = copy.from ? pwrite(file_.file, buffer + i, whole - i, place)
                                    : pread(file_.file, buffer + i, whole - i, place);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n < 0 ? errno : EIO;
        i += static_cast<std::size_t>(n);
      }
      if (copy.to) std::memcpy(copy.to + done, buffer, bytes);
    }
    return 0;
  }

  const fs::path directory_;
  Descriptor file_;
  const std::unique_ptr<std::byte, decltype(&std::free)> buffer_{
      static_cast<std::byte*>(std::aligned_alloc(kFarAlignment, kBuffer)), &std::free};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Copy> queue_;
  std::size_t started_ = 0, finished_ = 0;
  bool ended_ = false;
  std::string error_;  // the first one; later copies do nothing
  std::thread thread_;
};

}  // namespace streambp
