// Writes a token file document by document. Only the ends of the documents are held in memory.
#pragma once

#include "data/documents/token_file.h"

namespace streambp {

// Collects values for a file at `path` without holding them in memory. They go to a temporary file in the same
// directory, which is already unlinked, so it disappears with the process.
template <class T>
class Spool {
 public:
  explicit Spool(const fs::path& path) : path_(path) {
    const std::string name = path.string() + ".tmp-" + std::to_string(std::random_device()());
    const int file = open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    require(file >= 0, path.string(), ": cannot write: ", std::strerror(errno), "; choose another place");
    unlink(name.c_str());
    file_.reset(fdopen(file, "w+b"));
    require(file_ != nullptr, path.string(), ": cannot write: ", std::strerror(errno));
  }

  void add(std::span<const T> values) {
    if (values.empty()) return;  // data() may be null
    const bool written = std::fwrite(values.data(), sizeof(T), values.size(), file_.get()) == values.size();
    require(written, path_.string(), ": cannot write: ", std::strerror(errno),
            "; free some space or choose another place");
    count_ += std::ssize(values);
  }
  Index count() const { return count_; }

  // Writes take(value) for every value.
  template <class Take>
  void copy(std::ostream& out, const Take& take) {
    using U = std::invoke_result_t<Take, T>;
    std::vector<T> block(1 << 16);
    std::vector<U> values(block.size());
    std::rewind(file_.get());
    for (Index left = count_; left > 0;) {
      const std::size_t n = std::min(block.size(), static_cast<std::size_t>(left));
      const bool read = std::fread(block.data(), sizeof(T), n, file_.get()) == n;
      require(read, path_.string(), ": cannot read its temporary file: ", std::strerror(errno));
      std::transform(block.begin(), block.begin() + static_cast<std::ptrdiff_t>(n), values.begin(), take);
      out.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(n * sizeof(U)));
      left -= static_cast<Index>(n);
    }
  }

 private:
  fs::path path_;
  FilePointer file_;
  Index count_ = 0;
};

class TokenWriter {
 public:
  explicit TokenWriter(const fs::path& path) : path_(path), words_(path), old_(path) {}

  void add(const Document& document) {
    const auto& [tokens, learn, advantage, old] = document;
    require(!tokens.empty() && tokens.size() == learn.size() && (old.empty() || old.size() == tokens.size()),
            path_.string(), ": cannot write a document of ", tokens.size(), " tokens");
    block_.resize(tokens.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      require(tokens[i] >= 0, path_.string(), ": token ", tokens[i], " is negative");
      block_[i] = static_cast<std::uint32_t>(tokens[i]) << 1 | (learn[i] != 0);
    }
    words_.add(block_);
    old_.add(old);
    if (advantage) advantages_.push_back(*advantage);
    hashes_ ^= document_hash(documents(), tokens, learn, old, advantage);
    ends_.push_back(words_.count());
  }

  Index documents() const { return std::ssize(ends_); }
  Index tokens_count() const { return words_.count(); }
  std::string fingerprint(DataKind kind) const { return fingerprint_of(hashes_, documents(), kind); }

  void finish(const std::map<std::string, std::string>& metadata) {
    const Index n = tokens_count(), groups = std::ssize(advantages_);
    require((groups == 0 || groups == documents()) && (old_.count() == 0 || old_.count() == n), path_.string(),
            ": some documents have advantages or old log-probs and others do not");
    SafetensorsWriter file(path_, metadata);
    file.add("ends", "I64", {documents()}, ends_.data(), ends_.size() * sizeof(Index));
    if (groups > 0) {
      file.add("advantages", "F64", {groups, 2}, advantages_.data(), advantages_.size() * sizeof(Advantage));
    }
    file.add("tokens", "I32", {n}, [&](std::ostream& out) {
      words_.copy(out, [](std::uint32_t word) { return static_cast<std::int32_t>(word >> 1); });
    });
    if (old_.count() > 0) {
      file.add("old", "F32", {n}, [&](std::ostream& out) { old_.copy(out, [](float x) { return x; }); });
    }
    file.add("learn", "U8", {n}, [&](std::ostream& out) {
      words_.copy(out, [](std::uint32_t word) { return static_cast<std::uint8_t>(word & 1); });
    });
    file.finish();
  }

 private:
  fs::path path_;
  Spool<std::uint32_t> words_;  // token << 1 | learn
  Spool<float> old_;
  std::vector<Index> ends_;
  std::vector<Advantage> advantages_;
  std::vector<std::uint32_t> block_;
  std::uint64_t hashes_ = 0;
};

}  // namespace streambp
