// A file mapped into memory, to be read.
//
// If another program truncates the file meanwhile, reading beyond its new end raises SIGBUS. The handler then maps zeros
// there, so that the reader goes on, and require_intact() reports it: after a batch or a model was read, and before any
// file is complete that was made from it.
#pragma once

#include <signal.h>

#include <array>
#include <atomic>
#include <cstddef>

#include "kernels/base/system.h"

namespace streambp {

class MappedFile {
 public:
  // `size`: the size of the file, which is not empty.
  MappedFile(const fs::path& path, std::size_t size) : path_(path.string()), size_(size) {
    file_.file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    require(file_.file >= 0, path_, ": cannot open: ", std::strerror(errno), "; check its permissions");
    void* block = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file_.file, 0);
    require(block != MAP_FAILED, path_, ": cannot map into memory: ", std::strerror(errno));
    data_ = static_cast<std::byte*>(block);
    written_ = last_write();
    enter();
  }
  ~MappedFile() {
    leave();
    munmap(data_, size_);
  }
  MappedFile(const MappedFile&) = delete;

  const std::byte* data() const { return data_; }

  // Whether the file was written since it was opened, or since the last call.
  bool was_written() {
    const auto before = written_;
    return (written_ = last_write()) != before;
  }

  // Refuses to go on if a mapped file has lost bytes that were read.
  static void require_intact() {
    if (!any_lost_.exchange(false)) return;
    std::string lost = lost_before_;
    for (auto& entry : all_)
      if (MappedFile* file = entry; file && file->lost_.exchange(false)) lost = file->path_;
    fail(lost, ": was truncated while it was being read, or its disk failed; restore it");
  }

 private:
  // The time of the last write, in nanoseconds, and the size.
  std::array<std::int64_t, 3> last_write() const {
    struct stat status {};
    fstat(file_.file, &status);
    return {written_at(status).tv_sec, written_at(status).tv_nsec, status.st_size};
  }

  // In the list for the handler. A file beyond its end has no protection.
  void enter() {
    static const bool installed = install();
    static_cast<void>(installed);
    for (auto& entry : all_) {
      MappedFile* none = nullptr;
      if (entry.compare_exchange_strong(none, this)) return;
    }
  }
  void leave() {
    if (lost_) lost_before_ = path_;
    for (auto& entry : all_) {
      MappedFile* self = this;
      if (entry.compare_exchange_strong(self, nullptr)) return;
    }
  }

  static bool install() {
    struct sigaction action = {};
    action.sa_sigaction = replace_lost_pages;
    action.sa_flags = SA_SIGINFO | SA_RESTART;
    sigemptyset(&action.sa_mask);
    return sigaction(SIGBUS, &action, &before_) == 0;
  }

  static void replace_lost_pages(int signal, siginfo_t* info, void*) {
    const int error = errno;
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto at = reinterpret_cast<std::uintptr_t>(info->si_addr) / page * page;
    for (auto& entry : all_) {
      MappedFile* file = entry;
      const auto begin = reinterpret_cast<std::uintptr_t>(file ? file->data_ : nullptr);
      if (!file || at < begin || at >= begin + file->size_) continue;
      void* zeros = mmap(reinterpret_cast<void*>(at), begin + file->size_ - at, PROT_READ,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
      if (zeros == MAP_FAILED) break;
      file->lost_ = any_lost_ = true;
      errno = error;
      return;
    }
    sigaction(signal, &before_, nullptr);  // not ours: the instruction raises it again
    errno = error;
  }

  static constexpr std::size_t kMost = 4096;
  static inline std::array<std::atomic<MappedFile*>, kMost> all_{};
  static inline std::atomic<bool> any_lost_ = false;
  static inline std::string lost_before_;  // a file that was closed since
  static inline struct sigaction before_ = {};

  const std::string path_;
  const std::size_t size_;
  Descriptor file_;
  std::byte* data_ = nullptr;
  std::array<std::int64_t, 3> written_{};
  std::atomic<bool> lost_ = false;
};

}  // namespace streambp
