// Temporary files without a name: they disappear with the process, even if it crashes.
#pragma once

#include <fcntl.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>

#include "kernels/base/error.h"

namespace streambp {

// Owns a file descriptor.
struct Descriptor {
  int file = -1;

  Descriptor() = default;
  Descriptor(const Descriptor&) = delete;
  ~Descriptor() { reset(); }
  void reset() {
    if (file >= 0) close(std::exchange(file, -1));
  }
};

// Whether a directory is in memory (tmpfs), so that its files save none.
inline bool is_in_memory(const std::filesystem::path& directory) {
  constexpr auto kTmpfs = 0x01021994;
  struct statfs system {};
  return statfs(directory.c_str(), &system) == 0 && system.f_type == kTmpfs;
}

// TMPDIR, or /tmp. If /tmp is in memory, /var/tmp.
inline std::filesystem::path temporary_directory() {
  std::error_code error;
  const std::filesystem::path directory = std::filesystem::temp_directory_path(error);
  require(!error, "there is no directory for temporary files: ", error.message(),
          "; set TMPDIR to a directory with enough space");
  const bool chosen = std::getenv("TMPDIR") != nullptr;
  return !chosen && is_in_memory(directory) && access("/var/tmp", W_OK) == 0 ? "/var/tmp" : directory;
}

// A new file without a name, for reading and writing.
inline void open_temporary_file(Descriptor& file, const std::filesystem::path& directory) {
  std::string path = (directory / "streambp-XXXXXX").string();  // mkostemp replaces the Xs
  file.file = mkostemp(path.data(), O_CLOEXEC);
  require(file.file >= 0, directory.string(), ": cannot create a temporary file here: ", std::strerror(errno),
          "; set TMPDIR, or for far memory --far, to another directory");
  unlink(path.c_str());
}

}  // namespace streambp
