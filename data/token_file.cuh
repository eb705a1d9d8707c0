// Tokenised data: one safetensors file that is mapped, not read, so that it may be larger than memory.
//
//   "ends"     I64 [documents]   where each document ends; it begins where the one before ends
//   "tokens"   I32 [N]
//   "learn"    U8  [N]           1: this token is to be predicted from those before it
//
// Where the metadata say "kind": "preferences", documents 2i and 2i + 1 are a pair: two answers to one prompt, the
// chosen one first.
//
// And how it is written: document by document, with only `ends` in memory; and how llm.c's files of tokens become one.
#pragma once

#include <array>
#include <atomic>
#include <span>

#include "../kernels/random.cuh"
#include "safetensors.cuh"

namespace streambp {

class TokenFile {
 public:
  explicit TokenFile(const std::filesystem::path& path) : file_(path) {
    ends_ = numbers<Index>("ends", "I64");
    tokens_ = numbers<std::int32_t>("tokens", "I32");
    learn_ = numbers<std::uint8_t>("learn", "U8");
    Index end = 0;
    for (std::size_t i = 0; i < ends_.size(); end = ends_[i++]) {
      require(ends_[i] > end, this->path(), ": document ", i, " ends at token ", ends_[i], " but begins at ", end,
              kRemedy);
    }
    require(end == token_count() && tokens_.size() == learn_.size(), this->path(), ": documents end after ", end,
            " tokens, and there are ", tokens_.size(), " tokens and ", learn_.size(), " marks of what to learn",
            kRemedy);
    const auto kind = metadata().find("kind");
    if (kind == metadata().end() || kind->second == "documents") return;
    require(kind->second == "preferences", this->path(), ": the data are \"", kind->second,
            "\", neither documents nor preferences", kRemedy);
    preferences_ = true;
    require(documents() % 2 == 0, this->path(), ": preferences are pairs of documents, and there are ", documents(),
            kRemedy);
    for (Index i = 0; i < documents(); ++i) {
      const auto marks = learn(i).subspan(1);
      require(std::any_of(marks.begin(), marks.end(), [](auto mark) { return mark; }), this->path(), ": the ",
              i % 2 ? "rejected" : "chosen", " document of pair ", i / 2 + 1, " has nothing to learn", kRemedy);
    }
  }

  std::string path() const { return file_.path().string(); }
  const std::map<std::string, std::string>& metadata() const { return file_.metadata(); }
  bool preferences() const { return preferences_; }
  // Documents that belong together: the two of a pair, or each by itself.
  Index together() const { return preferences_ ? 2 : 1; }
  Index documents() const { return static_cast<Index>(ends_.size()); }
  Index token_count() const { return static_cast<Index>(tokens_.size()); }
  Index begin(Index i) const { return i == 0 ? 0 : ends_[static_cast<std::size_t>(i - 1)]; }
  Index length(Index i) const { return ends_[static_cast<std::size_t>(i)] - begin(i); }
  std::span<const std::int32_t> tokens(Index i) const { return part(tokens_, i); }
  std::span<const std::uint8_t> learn(Index i) const { return part(learn_, i); }

  std::vector<Index> lengths() const {
    std::vector<Index> lengths(ends_.size());
    for (Index i = 0; i < documents(); ++i) lengths[static_cast<std::size_t>(i)] = length(i);
    return lengths;
  }
  Index longest() const {
    const auto all = lengths();
    return all.empty() ? 0 : *std::max_element(all.begin(), all.end());
  }
  // The most tokens that belong together, and so need room in one pack.
  Index longest_together() const {
    Index most = 0;
    for (Index i = 0; i < documents(); i += together()) {
      most = std::max(most, ends_[static_cast<std::size_t>(i + together() - 1)] - begin(i));
    }
    return most;
  }
  // Tokens that are predicted: a document's first has nothing before it.
  Index learned_count() const {
    Index count = 0;
#pragma omp parallel for reduction(+ : count)
    for (Index i = 0; i < documents(); ++i) {
      const auto marks = learn(i).subspan(1);
      count += static_cast<Index>(marks.size()) - std::count(marks.begin(), marks.end(), 0);
    }
    return count;
  }

  // Looks at every value once; the file may come from elsewhere, and its vocabulary be another model's.
  void require_vocabulary(Index vocab) const {
    constexpr Index none = INT64_MAX;
    Index first = none;
#pragma omp parallel for reduction(min : first)
    for (Index i = 0; i < token_count(); ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (tokens_[at] < 0 || tokens_[at] >= vocab || learn_[at] > 1) first = std::min(first, i);
    }
    if (first == none) return;
    const auto at = static_cast<std::size_t>(first);
    require(learn_[at] <= 1, path(), ": \"learn\" of token ", first, " is ", +learn_[at], ", neither 0 nor 1", kRemedy);
    fail(path(), ": token ", first, " is ", tokens_[at], ", outside the model's vocabulary of ", vocab,
         "; was the data tokenised for another model?");
  }

  // Tells data apart, so that a run is not resumed on other data.
  std::string fingerprint() const {
    std::uint64_t hash = mix(static_cast<std::uint64_t>(documents())) + preferences_;
#pragma omp parallel for reduction(^ : hash)
    for (Index i = 0; i < documents(); ++i) {
      std::uint64_t document = mix(static_cast<std::uint64_t>(i));
      const auto words = tokens(i);
      const auto marks = learn(i);
      for (std::size_t t = 0; t < words.size(); ++t) {
        document = (document ^ (static_cast<std::uint64_t>(static_cast<std::uint32_t>(words[t])) << 1 | marks[t])) *
                   0x9e3779b97f4a7c15u;
        document ^= document >> 32;
      }
      hash ^= mix(document);
    }
    return std::to_string(hash);
  }

 private:
  static constexpr const char* kRemedy = "; tokenise the data again";

  template <class T>
  std::span<const T> numbers(const char* name, const char* dtype) const {
    const Tensor& tensor = file_.at(name);
    require(tensor.dtype == dtype && tensor.shape.size() == 1, tensor.where, ": a list of ", dtype,
            " is expected, not ", tensor.dtype, " of shape ", Json(tensor.shape).dump(), kRemedy);
    require(reinterpret_cast<std::uintptr_t>(tensor.data) % alignof(T) == 0, tensor.where,
            ": does not lie at a multiple of its type's size; write the file with the safetensors library");
    return {reinterpret_cast<const T*>(tensor.data), static_cast<std::size_t>(tensor.count)};
  }
  template <class T>
  std::span<const T> part(std::span<const T> all, Index i) const {
    return all.subspan(static_cast<std::size_t>(begin(i)), static_cast<std::size_t>(length(i)));
  }

  SafetensorsFile file_;
  std::span<const Index> ends_;
  std::span<const std::int32_t> tokens_;
  std::span<const std::uint8_t> learn_;
  bool preferences_ = false;
};

// A document while it is made.
struct Document {
  std::vector<std::int32_t> tokens;
  std::vector<std::uint8_t> learn;

  void add(std::span<const std::int32_t> more, bool learned) {
    tokens.insert(tokens.end(), more.begin(), more.end());
    learn.resize(tokens.size(), learned);
  }
  Index learned() const { return std::count(learn.begin() + !learn.empty(), learn.end(), 1); }
};

class TokenWriter {
 public:
  explicit TokenWriter(const std::filesystem::path& path) : path_(path) {
    // Lies beside its place, has no name any more, and so goes with the program, however that ends.
    const std::string name = path.string() + ".tmp-" + std::to_string(std::random_device()());
    const int file = open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    require(file >= 0, path.string(), ": cannot write: ", std::strerror(errno), "; choose another place");
    unlink(name.c_str());
    spool_.reset(fdopen(file, "w+b"));
    require(spool_ != nullptr, path.string(), ": cannot write: ", std::strerror(errno));
  }

  void add(std::span<const std::int32_t> tokens, std::span<const std::uint8_t> learn) {
    require(!tokens.empty() && tokens.size() == learn.size(), path_.string(), ": a document of ", tokens.size(),
            " tokens");
    block_.resize(tokens.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      require(tokens[i] >= 0, path_.string(), ": token ", tokens[i], " is negative");
      block_[i] = static_cast<std::uint32_t>(tokens[i]) << 1 | (learn[i] != 0);
    }
    const bool written =
        std::fwrite(block_.data(), sizeof(std::uint32_t), block_.size(), spool_.get()) == block_.size();
    require(written, path_.string(), ": cannot write: ", std::strerror(errno), "; make room or choose another place");
    ends_.push_back(tokens_count() + static_cast<Index>(tokens.size()));
  }
  void add(const Document& document) { add(document.tokens, document.learn); }

  Index documents() const { return static_cast<Index>(ends_.size()); }
  Index tokens_count() const { return ends_.empty() ? 0 : ends_.back(); }

  void finish(const std::map<std::string, std::string>& metadata) {
    const Index n = tokens_count();
    SafetensorsWriter file(path_, metadata);
    file.add("ends", "I64", {documents()}, ends_.data(), ends_.size() * sizeof(Index));
    file.add("tokens", "I32", {n}, [&](std::ostream& out) {
      copy<std::int32_t>(out, [](std::uint32_t word) { return static_cast<std::int32_t>(word >> 1); });
    });
    file.add("learn", "U8", {n}, [&](std::ostream& out) {
      copy<std::uint8_t>(out, [](std::uint32_t word) { return static_cast<std::uint8_t>(word & 1); });
    });
    file.finish();
  }

 private:
  template <class T, class Take>
  void copy(std::ostream& out, const Take& take) {
    std::vector<std::uint32_t> words(1 << 16);
    std::vector<T> values(words.size());
    std::rewind(spool_.get());
    for (Index left = tokens_count(); left > 0;) {
      const std::size_t n = std::min(words.size(), static_cast<std::size_t>(left));
      require(std::fread(words.data(), sizeof(std::uint32_t), n, spool_.get()) == n, path_.string(),
              ": cannot read its temporary file: ", std::strerror(errno));
      std::transform(words.begin(), words.begin() + static_cast<std::ptrdiff_t>(n), values.begin(), take);
      out.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(n * sizeof(T)));
      left -= static_cast<Index>(n);
    }
  }

  struct Close {
    void operator()(FILE* file) const { std::fclose(file); }
  };
  std::filesystem::path path_;
  std::unique_ptr<FILE, Close> spool_;  // token << 1 | learn
  std::vector<Index> ends_;
  std::vector<std::uint32_t> block_;
};

// llm.c's files of tokens: 256 int32 (magic, version, count, ...), then the tokens. A document begins with the token
// that ends a text, in GPT-2's vocabulary, or begins it, in Llama 3's. Everything in it is learned.
inline void add_bin_file(const std::filesystem::path& path, TokenWriter& writer) {
  const std::size_t size = regular_file_size(path);
  std::ifstream file(path, std::ios::binary);
  std::array<std::int32_t, 256> header{};
  require(size >= sizeof header && file.read(reinterpret_cast<char*>(header.data()), sizeof header), path.string(),
          ": ", size, " bytes are too few for a file of tokens; get it again");
  const bool gpt2 = header[0] == 20240520 && header[1] == 1, llama3 = header[0] == 20240801 && header[1] == 7;
  require(gpt2 || llama3, path.string(), ": magic number ", header[0], " and version ", header[1],
          " are neither GPT-2's (",
          "20240520, 1) nor Llama 3's (20240801, 7); other tokens can be given as a .safetensors file");
  const std::size_t width = gpt2 ? 2 : 4, room = (size - sizeof header) / width;
  require(header[2] >= 0 && static_cast<std::size_t>(header[2]) == room && (size - sizeof header) % width == 0,
          path.string(), ": claims ", header[2], " tokens, and has room for ", room, "; get it again");
  const std::int32_t first = gpt2 ? 50256 : 128000;
  Document document;
  const auto complete = [&] {
    if (!document.tokens.empty()) document.learn[0] = 0, writer.add(document);
    document = {};
  };
  const std::size_t most = std::min(room, std::size_t{1} << 20);  // at once
  std::vector<char> block(width * most);
  for (std::size_t left = room; left > 0;) {
    const std::size_t n = std::min(left, most);
    require(static_cast<bool>(file.read(block.data(), static_cast<std::streamsize>(n * width))), path.string(),
            ": cannot read: ", std::strerror(errno));
    for (std::size_t i = 0; i < n; ++i) {
      std::uint32_t word = 0;
      std::memcpy(&word, block.data() + i * width, width);  // little-endian
      require(word <= INT32_MAX, path.string(), ": token ", word, " is in no vocabulary; get the file again");
      const std::int32_t token = static_cast<std::int32_t>(word);
      if (token == first) complete();
      document.add({&token, 1}, true);
    }
    left -= n;
  }
  complete();
}

}  // namespace streambp
