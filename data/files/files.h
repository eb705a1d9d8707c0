// Reads and writes whole files. Errors name the file. Writing is atomic: a file is either complete or unchanged.
#pragma once

#include <cctype>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <system_error>

#include "data/files/mapped_file.h"
#include "kernels/base/unfinished.h"
#include "text/json.h"

namespace streambp {

constexpr const char* kLongestTemporary = ".tmp-4294967295";  // at the end of the name of a file being written

// False also for names that are too long.
inline bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

inline std::size_t regular_file_size(const fs::path& path) {
  std::error_code error;
  const auto status = fs::status(path, error);
  require(status.type() != fs::file_type::not_found, path.string(), ": no such file; check the path");
  require(!is_directory(status), path.string(), ": is a directory, not a file; name a file in it");
  require(is_regular_file(status), path.string(), ": is not a regular file that can be read; check the path");
  const auto size = fs::file_size(path, error);
  require(!error, path.string(), ": cannot read its size: ", error.message());
  return size;
}

constexpr std::size_t kLongestText = std::size_t{1} << 26;  // bytes of a small file, such as a tokenizer, or of a line

inline std::string read_file(const fs::path& path, std::size_t limit = kLongestText) {
  const std::size_t size = regular_file_size(path);
  require(size <= limit, path.string(), ": has ", size, " bytes, more than the ", limit,
          " that are read; is it the right file?");
  std::string contents(size, '\0');
  std::ifstream file(path, std::ios::binary);
  if (file) file.read(contents.data(), static_cast<std::streamsize>(contents.size()));
  require(file.good(), path.string(), ": cannot read: ", std::strerror(errno), "; check its permissions");
  return contents;
}

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using FilePointer = std::unique_ptr<std::FILE, CloseFile>;

inline FilePointer open_to_read(const fs::path& path) {
  FilePointer file(std::fopen(path.c_str(), "rb"));
  require(file != nullptr, path.string(), ": cannot read: ", std::strerror(errno), "; check its permissions");
  return file;
}
// Fills the block from the file and returns the number of bytes; less than the block only at the end.
inline std::size_t read_block(const FilePointer& file, std::string& block, const fs::path& path) {
  const std::size_t count = std::fread(block.data(), 1, block.size(), file.get());
  require(!std::ferror(file.get()), path.string(), ": cannot read: ", std::strerror(errno));
  return count;
}

// The type of a file by its name: the extension with its dot, in lower case.
inline std::string extension_of(const fs::path& path) {
  std::string extension = path.extension().string();
  for (char& c : extension) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return extension;
}
// The same without .gz and .zst.
inline std::string content_type(const fs::path& path) {
  const std::string extension = extension_of(path);
  return extension == ".gz" || extension == ".zst" ? extension_of(path.stem()) : extension;
}

// Whether the file holds JSON values: one per line, or all in a list.
inline bool holds_json(const fs::path& path) {
  const std::string type = content_type(path);
  return type == ".jsonl" || type == ".ndjson" || type == ".json";
}

// Refuses a path that cannot be written. Call before doing the work.
inline void require_writable(const fs::path& path) {
  const fs::path directory = path.has_parent_path() ? path.parent_path() : ".";
  std::error_code error;
  const auto status = fs::status(path, error);
  require(!is_directory(status), path.string(), ": is a directory, not a file; name a file in it");
  require(!exists(status) || is_regular_file(status), path.string(), ": exists and is not a file; choose another name");
  // It is written under a longer name first.
  const auto type = fs::status(path.string() + kLongestTemporary, error).type();
  require(type != fs::file_type::none, path.string(), ": cannot be written: ", error.message(),
          "; choose a shorter name, or another place");
  require(is_directory(directory), path.string(), ": there is no directory ", directory.string(), "; create it first");
  const bool writable = access(directory.c_str(), W_OK) == 0;
  require(writable, path.string(), ": cannot write to ", directory.string(), ": ", std::strerror(errno),
          "; choose another place");
}

// Waits until a file's contents, or a directory's entries, are on disk.
inline bool flush_to_disk(const fs::path& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const bool flushed = fsync(file) == 0;
  const int error = errno;
  close(file);
  errno = error;
  return flushed;
}

// Waits until a directory's entries are on disk, if its file system can flush directories.
inline void flush_directory(const fs::path& path) {
  const bool flushed = flush_to_disk(path.empty() ? "." : path);
  const bool cannot = errno == EINVAL || errno == ENOTSUP || errno == EACCES || errno == EROFS;
  if (!flushed && !cannot) throw std::system_error(errno, std::generic_category());
}

// Renames a file or directory durably: the new name survives a power failure.
inline void rename_durably(const fs::path& from, const fs::path& to) {
  fs::rename(from, to);
  flush_directory(to.parent_path());
}

// A file that a signal can cancel.
class OutputFile : public std::filebuf {
 protected:
  std::streamsize xsputn(const char* bytes, std::streamsize count) override {
    Unfinished::check();
    return std::filebuf::xsputn(bytes, count);
  }
  int_type overflow(int_type byte) override {
    Unfinished::check();
    return std::filebuf::overflow(byte);
  }
};

// Calls produce(stream) to write the contents. If anything fails, or a signal comes, the file keeps its old contents.
inline void write_file_atomically(const fs::path& path, const std::function<void(std::ostream&)>& produce) {
  std::error_code error;
  const auto status = fs::status(path, error);
  require(!exists(status) || is_regular_file(status), path.string(), ": exists and is not a file; choose another name");
  const std::string temporary = path.string() + ".tmp-" + std::to_string(std::random_device()());
  const Unfinished unfinished;
  try {
    OutputFile file;
    std::ostream out(&file);
    out.exceptions(std::ios::badbit | std::ios::failbit);
    const auto check = [](bool good) {
      if (!good) throw std::system_error(errno, std::generic_category());
    };
    check(file.open(temporary, std::ios::out | std::ios::binary));
    produce(out);
    check(file.close());
    MappedFile::require_intact();
    check(flush_to_disk(temporary));
    rename_durably(temporary, path);
  } catch (const std::system_error&) {  // may come from the stream, and then its message does not name the cause
    const int cause = errno;
    fs::remove(temporary, error);
    fail(path.string(), ": cannot write: ", std::strerror(cause), "; free some space or choose another place");
  } catch (...) {
    fs::remove(temporary, error);
    throw;
  }
  Unfinished::check();
}

// Calls produce(directory) to fill a new directory, under a temporary name that no other directory may have. If anything
// fails, or a signal comes, nothing is left of it.
template <class F>
void create_directory_atomically(const fs::path& path, const fs::path& temporary, F&& produce) {
  const Unfinished unfinished;
  std::error_code error;
  fs::create_directories(temporary, error);
  require(!error, temporary.string(), ": cannot create the directory: ", error.message(), "; free some space in ",
          path.parent_path().string(), " or check its permissions");
  try {
    produce(temporary);
    flush_directory(temporary);
    rename_durably(temporary, path);
  } catch (const std::system_error& failure) {
    fs::remove_all(temporary, error);
    fail(path.string(), ": cannot save: ", failure.code().message());
  } catch (...) {
    fs::remove_all(temporary, error);
    throw;
  }
  Unfinished::check();
}

// A temporary directory that only this user can read. It disappears with the object, or at a signal.
class PrivateDirectory {
 public:
  PrivateDirectory() {
    std::string name = (temporary_directory() / "streambp-XXXXXX").string();
    const bool created = mkdtemp(name.data()) != nullptr;
    require(created, name, ": cannot create a temporary directory: ", std::strerror(errno),
            "; set TMPDIR to another place");
    path_ = name;
  }
  ~PrivateDirectory() {
    std::error_code error;
    fs::remove_all(path_, error);
  }
  PrivateDirectory(const PrivateDirectory&) = delete;
  const fs::path& path() const { return path_; }

 private:
  const Unfinished unfinished_;
  fs::path path_;
};

inline void write_file_atomically(const fs::path& path, std::string_view contents) {
  write_file_atomically(path, [&](std::ostream& out) { out << contents; });
}

// JSON as text. Paths may not be UTF-8.
template <class J>
std::string text_of(const J& json, int indent = -1) {
  return json.dump(indent, ' ', false, J::error_handler_t::replace);
}

inline Json parse_json_file(const fs::path& path) { return parse_json(read_file(path), path.string()); }

}  // namespace streambp
