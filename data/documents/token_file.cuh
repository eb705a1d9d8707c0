// Tokenised data: one safetensors file that is mapped, not read, so that it may be larger than memory.
//
//   "ends"     I64 [documents]   where each document ends; it begins where the one before ends
//   "tokens"   I32 [N]
//   "learn"    U8  [N]           1: this token is to be predicted from those before it
//
// Where the metadata say "kind": "preferences", documents 2i and 2i + 1 are a pair: two answers to one prompt, the
// chosen one first. Where they say "groups", documents are completions that were rewarded, and there are also
//
//   "advantages"   F64 [documents, 2]   how much better than its group each was, and the same in units of the group's deviation
//   "old"          F32 [N]              if known: the log-probability, when it was sampled, of the token after each
//
// And how it is written: document by document, with only `ends` in memory; and how llm.c's files of tokens become one.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <optional>
#include <span>

#include "data/files/safetensors.cuh"
#include "kernels/base/random.cuh"

namespace streambp {

enum class DataKind { documents, preferences, groups };
constexpr const char* kDataKinds[] = {"documents", "preferences", "groups"};  // in files
constexpr const char* kDataUnits[] = {"document", "pair", "completion"};      // to count

struct Advantage {
  double plain = 0, scaled = 0;
};

// What a model can be trained with: numbers whose exponentials and products have room in a float32.
inline bool is_advantage(const Advantage& a) { return std::abs(a.plain) < 1e30 && std::abs(a.scaled) < 1e30; }
inline bool is_log_probability(double x) { return -80 < x && x < 0.01; }

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
    if (kind == metadata().end()) return;
    const auto known = std::ranges::find(kDataKinds, kind->second);
    require(known != std::end(kDataKinds), this->path(), ": the data are \"", kind->second,
            "\", neither documents nor preferences nor groups", kRemedy);
    kind_ = static_cast<DataKind>(known - std::begin(kDataKinds));
    if (preferences()) require_pairs();
    if (groups()) read_groups();
  }

  std::string path() const { return file_.path().string(); }
  const std::map<std::string, std::string>& metadata() const { return file_.metadata(); }
  DataKind kind() const { return kind_; }
  bool preferences() const { return kind_ == DataKind::preferences; }
  bool groups() const { return kind_ == DataKind::groups; }
  // Documents that belong together: the two of a pair, or each by itself.
  Index together() const { return preferences() ? 2 : 1; }
  Index documents() const { return static_cast<Index>(ends_.size()); }
  Index token_count() const { return static_cast<Index>(tokens_.size()); }
  Index begin(Index i) const { return i == 0 ? 0 : ends_[static_cast<std::size_t>(i - 1)]; }
  Index length(Index i) const { return ends_[static_cast<std::size_t>(i)] - begin(i); }
  std::span<const std::int32_t> tokens(Index i) const { return part(tokens_, i); }
  std::span<const std::uint8_t> learn(Index i) const { return part(learn_, i); }

  // Of groups alone.
  Advantage advantage(Index i) const {
    const auto at = 2 * static_cast<std::size_t>(i);
    return {advantages_[at], advantages_[at + 1]};
  }
  std::span<const float> old() const { return old_; }  // empty: not known

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

  // The most that is learned of one document.
  Index most_learned() const {
    Index most = 0;
    for (Index i = 0; i < documents(); ++i) {
      most = std::max<Index>(most, std::ranges::count(learn(i).subspan(1), std::uint8_t{1}));
    }
    return most;
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
    std::uint64_t hash = mix(static_cast<std::uint64_t>(documents())) + static_cast<std::uint64_t>(kind_);
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
      for (const float x : old_.empty() ? old_ : part(old_, i))
        document = mix(document ^ std::bit_cast<std::uint32_t>(x));
      if (groups()) {
        document = mix(document ^ std::bit_cast<std::uint64_t>(advantage(i).plain));
        document = mix(document ^ std::bit_cast<std::uint64_t>(advantage(i).scaled));
      }
      hash ^= mix(document);
    }
    return std::to_string(hash);
  }

 private:
  static constexpr const char* kRemedy = "; tokenise the data again";

  void require_pairs() const {
    require(documents() % 2 == 0, path(), ": preferences are pairs of documents, and there are ", documents(), kRemedy);
    for (Index i = 0; i < documents(); ++i) {
      require(learns(i), path(), ": the ", i % 2 ? "rejected" : "chosen", " document of pair ", i / 2 + 1,
              " has nothing to learn", kRemedy);
    }
  }

  void read_groups() {
    advantages_ = numbers<double>("advantages", "F64", 2);
    require(advantages_.size() == 2 * ends_.size(), path(), ": ", advantages_.size() / 2, " advantages of ",
            documents(), " completions", kRemedy);
    for (Index i = 0; i < documents(); ++i) {
      require(learns(i), path(), ": completion ", i + 1, " has nothing to learn", kRemedy);
      require(is_advantage(advantage(i)), path(), ": the advantages of completion ", i + 1, ", ", advantage(i).plain,
              " and ", advantage(i).scaled, ", cannot be", kRemedy);
    }
    if (!file_.find("old")) return;
    old_ = numbers<float>("old", "F32");
    require(old_.size() == tokens_.size(), path(), ": ", old_.size(), " old log-probabilities of ", token_count(),
            " tokens", kRemedy);
    const auto bad = std::ranges::find_if_not(old_, is_log_probability);
    require(bad == old_.end(), path(), ": the old log-probability of token ", bad - old_.begin(), " cannot be",
            kRemedy);
  }

  bool learns(Index i) const {
    return std::ranges::any_of(learn(i).subspan(1), [](auto mark) { return mark; });
  }

  // A list of numbers, or of rows of `width` of them.
  template <class T>
  std::span<const T> numbers(const char* name, const char* dtype, Index width = 1) const {
    const Tensor& tensor = file_.at(name);
    const bool fits = width == 1 ? tensor.shape.size() == 1 : tensor.shape.size() == 2 && tensor.shape[1] == width;
    require(tensor.dtype == dtype && fits, tensor.where, ": a list of ", width > 1 ? "rows of " : "", dtype,
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
  std::span<const double> advantages_;
  std::span<const float> old_;
  DataKind kind_ = DataKind::documents;
};

// A document while it is made.
struct Document {
  std::vector<std::int32_t> tokens;
  std::vector<std::uint8_t> learn;
  std::optional<Advantage> advantage = {};  // of a group's completions
  std::vector<float> old = {};              // of each token; empty: not known

  void add(std::span<const std::int32_t> more, bool learned) {
    tokens.insert(tokens.end(), more.begin(), more.end());
    learn.resize(tokens.size(), learned);
  }
  Index learned() const { return std::count(learn.begin() + !learn.empty(), learn.end(), 1); }
};

// One of a file's, as it was before it was written.
inline Document document(const TokenFile& file, Index i) {
  const auto all = [](auto part) { return std::vector(part.begin(), part.end()); };
  Document document{all(file.tokens(i)), all(file.learn(i))};
  if (file.groups()) document.advantage = file.advantage(i);
  if (!file.old().empty()) {
    document.old = all(file.old().subspan(static_cast<std::size_t>(file.begin(i)), document.tokens.size()));
  }
  return document;
}

// Numbers on their way into a file, which need not fit into memory. They lie beside its place, in a file that has no name
// any more, and so goes with the program, however that ends.
template <class T>
class Spool {
 public:
  explicit Spool(const std::filesystem::path& path) : path_(path) {
    const std::string name = path.string() + ".tmp-" + std::to_string(std::random_device()());
    const int file = open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    require(file >= 0, path.string(), ": cannot write: ", std::strerror(errno), "; choose another place");
    unlink(name.c_str());
    file_.reset(fdopen(file, "w+b"));
    require(file_ != nullptr, path.string(), ": cannot write: ", std::strerror(errno));
  }

  void add(std::span<const T> values) {
    if (values.empty()) return;  // whose data() may be null
    const bool written = std::fwrite(values.data(), sizeof(T), values.size(), file_.get()) == values.size();
    require(written, path_.string(), ": cannot write: ", std::strerror(errno), "; make room or choose another place");
    count_ += static_cast<Index>(values.size());
  }
  Index count() const { return count_; }

  // All of them, each as what `take` makes of it.
  template <class Take>
  void copy(std::ostream& out, const Take& take) {
    using U = std::invoke_result_t<Take, T>;
    std::vector<T> block(1 << 16);
    std::vector<U> values(block.size());
    std::rewind(file_.get());
    for (Index left = count_; left > 0;) {
      const std::size_t n = std::min(block.size(), static_cast<std::size_t>(left));
      require(std::fread(block.data(), sizeof(T), n, file_.get()) == n, path_.string(),
              ": cannot read its temporary file: ", std::strerror(errno));
      std::transform(block.begin(), block.begin() + static_cast<std::ptrdiff_t>(n), values.begin(), take);
      out.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(n * sizeof(U)));
      left -= static_cast<Index>(n);
    }
  }

 private:
  struct Close {
    void operator()(FILE* file) const { std::fclose(file); }
  };
  std::filesystem::path path_;
  std::unique_ptr<FILE, Close> file_;
  Index count_ = 0;
};

class TokenWriter {
 public:
  explicit TokenWriter(const std::filesystem::path& path) : path_(path), words_(path), old_(path) {}

  void add(const Document& document) {
    const auto& [tokens, learn, advantage, old] = document;
    require(!tokens.empty() && tokens.size() == learn.size() && (old.empty() || old.size() == tokens.size()),
            path_.string(), ": a document of ", tokens.size(), " tokens");
    block_.resize(tokens.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      require(tokens[i] >= 0, path_.string(), ": token ", tokens[i], " is negative");
      block_[i] = static_cast<std::uint32_t>(tokens[i]) << 1 | (learn[i] != 0);
    }
    words_.add(block_);
    old_.add(old);
    if (advantage) advantages_.push_back(*advantage);
    ends_.push_back(words_.count());
  }

  Index documents() const { return static_cast<Index>(ends_.size()); }
  Index tokens_count() const { return words_.count(); }

  void finish(const std::map<std::string, std::string>& metadata) {
    const Index n = tokens_count(), groups = static_cast<Index>(advantages_.size());
    require((groups == 0 || groups == documents()) && (old_.count() == 0 || old_.count() == n), path_.string(),
            ": some documents have advantages or old log-probabilities, and others have none");
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
  std::filesystem::path path_;
  Spool<std::uint32_t> words_;  // token << 1 | learn
  Spool<float> old_;
  std::vector<Index> ends_;
  std::vector<Advantage> advantages_;
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
