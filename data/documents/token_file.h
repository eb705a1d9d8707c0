// Tokenised data in one safetensors file. The file is memory-mapped, so it may be larger than memory.
//
//   "ends"     I64 [documents]   the end of each document, which is the start of the next one
//   "tokens"   I32 [N]
//   "learn"    U8  [N]           1: the loss covers this token
//
// The metadata's "parts" are what the documents were made from, in order: a JSON list of {"name", "form", "documents",
// "weight", "apart"}. Training mixes parts with weights by them.
//
// If the metadata has "kind": "preferences", documents 2i and 2i + 1 are a pair: two answers to one prompt, the chosen
// one first. If it has "kind": "groups", documents are completions with rewards, and there are also
//
//   "advantages"   F64 [documents, 2]   reward minus the group's mean, and that divided by its standard deviation
//   "old"          F32 [N]              optional: the log-prob of the next token when it was sampled
#pragma once

#include <optional>
#include <span>

#include "data/files/safetensors.h"
#include "kernels/base/random.h"
#include "text/fields.h"

namespace streambp {

enum class DataKind { documents, preferences, groups };
constexpr const char* kDataKinds[] = {"documents", "preferences", "groups"};  // in files
constexpr const char* kDataUnits[] = {"document", "pair", "completion"};      // in messages

inline constexpr const char* kPlainText = "plain text";  // a form

// A part of the data: a file, or a folder of files.
struct TokenPart {
  std::string name, form;  // the form of its examples, such as "messages"; empty: unknown
  Index documents;
  double weight = 0;  // its share of the tokens, in proportion to other parts; 0: no weights are given
  Index apart = 0;    // documents that are further answers of an example

  // Texts in files of their own are for training on pieces; a document is one example.
  bool is_text() const { return form == kPlainText; }
};

struct Advantage {
  double plain = 0, scaled = 0;
};

// The range that training accepts: exponentials and products fit into float32.
inline bool is_advantage(const Advantage& a) { return std::abs(a.plain) < 1e30 && std::abs(a.scaled) < 1e30; }
inline bool is_log_probability(double x) { return -80 < x && x < 0.01; }

// Document i's part of the fingerprint of the data.
inline std::uint64_t document_hash(Index i, std::span<const std::int32_t> tokens, std::span<const std::uint8_t> learn,
                                   std::span<const float> old, const std::optional<Advantage>& advantage) {
  std::uint64_t hash = mix(static_cast<std::uint64_t>(i));
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    hash = (hash ^ (static_cast<std::uint64_t>(static_cast<std::uint32_t>(tokens[t])) << 1 | learn[t])) *
           0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }
  for (const float x : old) hash = mix(hash ^ std::bit_cast<std::uint32_t>(x));
  if (advantage) {
    hash = mix(hash ^ std::bit_cast<std::uint64_t>(advantage->plain));
    hash = mix(hash ^ std::bit_cast<std::uint64_t>(advantage->scaled));
  }
  return mix(hash);
}
// `hashes`: those of the documents, combined by exclusive or.
inline std::string fingerprint_of(std::uint64_t hashes, Index documents, DataKind kind) {
  return std::to_string(hashes ^ (mix(static_cast<std::uint64_t>(documents)) + static_cast<std::uint64_t>(kind)));
}

class TokenFile {
 public:
  // `name` is the name of the file in messages; for a cached file, the name of the user's data.
  explicit TokenFile(const fs::path& path, const std::string& name = "")
      : file_(path), name_(name.empty() ? path.string() : name) {
    const auto ends = numbers<Index>("ends", "I64");
    ends_ = {ends.begin(), ends.end()};  // in memory: if the file is damaged later, documents keep their places
    tokens_ = numbers<std::int32_t>("tokens", "I32");
    learn_ = numbers<std::uint8_t>("learn", "U8");
    require(documents() > 0, this->path(), ": holds no documents", kRemedy);
    Index end = 0;
    for (std::size_t i = 0; i < ends_.size(); end = ends_[i++]) {
      require(ends_[i] > end, this->path(), ": document ", i, " ends at token ", ends_[i], " but begins at ", end,
              kRemedy);
    }
    require(end == token_count() && tokens_.size() == learn_.size(), this->path(), ": documents end after ", end,
            " tokens, and there are ", tokens_.size(), " tokens and ", learn_.size(), " entries of \"learn\"", kRemedy);
    read_parts();
    const std::string kind = metadata("kind");
    if (kind.empty()) return;
    const auto known = std::ranges::find(kDataKinds, kind);
    require(known != std::end(kDataKinds), this->path(), ": unknown kind ", quote(kind),
            "; documents, preferences and groups are known", kRemedy);
    kind_ = static_cast<DataKind>(known - std::begin(kDataKinds));
    if (preferences()) require_pairs();
    if (groups()) read_groups();
  }

  std::string path() const { return file_.path().string(); }
  const std::string& name() const { return name_; }
  std::string metadata(const std::string& name) const { return file_.metadata(name); }
  // How many unusable examples of the data were skipped, and the first of them, and messages that the chat template left
  // out; empty: none.
  std::string skipped() const {
    const std::string count = metadata("skipped"), left_out = metadata("left_out");
    if (count.empty() || count == "0") return left_out;
    return "examples skipped: " + count + ", the first: " + metadata("first_skipped") + (left_out.empty() ? "" : "; ") +
           left_out;
  }
  std::vector<TokenPart> parts;  // at least one
  std::size_t held_out = 0;      // of the parts, the last ones, which are for evaluation only
  bool mixes() const { return parts[0].weight > 0; }
  DataKind kind() const { return kind_; }
  bool preferences() const { return kind_ == DataKind::preferences; }
  bool groups() const { return kind_ == DataKind::groups; }
  // The number of documents that belong together: 2 for pairs, else 1.
  Index together() const { return preferences() ? 2 : 1; }
  Index documents() const { return std::ssize(ends_); }
  Index token_count() const { return std::ssize(tokens_); }
  // Those before the parts that are held out.
  Index training_documents() const {
    Index count = documents();
    for (std::size_t i = 1; i <= held_out; ++i) count -= parts[parts.size() - i].documents;
    return count;
  }
  Index training_tokens() const { return begin(training_documents()); }
  Index begin(Index i) const { return i == 0 ? 0 : ends_[i - 1]; }
  Index length(Index i) const { return ends_[i] - begin(i); }
  std::span<const std::int32_t> tokens(Index i) const { return part(tokens_, i); }
  std::span<const std::uint8_t> learn(Index i) const { return part(learn_, i); }

  // For groups only.
  Advantage advantage(Index i) const { return {advantages_[2 * i], advantages_[2 * i + 1]}; }
  std::span<const float> old() const { return old_; }  // empty: unknown

  std::vector<Index> lengths() const {
    std::vector<Index> lengths(ends_.size());
    for (Index i = 0; i < documents(); ++i) lengths[i] = length(i);
    return lengths;
  }
  Index longest() const { return std::ranges::max(lengths()); }
  // The most tokens of a document or pair.
  Index longest_together() const {
    Index most = 0;
    for (Index i = 0; i < documents(); i += together()) most = std::max(most, ends_[i + together() - 1] - begin(i));
    return most;
  }
  // The same without texts in files of their own: what must fit into a stream.
  Index longest_whole() const {
    if (preferences()) return longest_together();
    Index most = 0, document = 0;
    for (const TokenPart& part : parts)
      for (const Index end = document + part.documents; document < end; ++document)
        if (!part.is_text()) most = std::max(most, length(document));
    return most;
  }
  // The number of tokens in the loss. The first token of a document never counts, because nothing precedes it.
  Index learned_count() const {
    Index count = 0;
#pragma omp parallel for reduction(+ : count)
    for (Index i = 0; i < documents(); ++i) {
      const auto marks = learn(i).subspan(1);
      count += std::ssize(marks) - std::ranges::count(marks, 0);
    }
    return count;
  }

  // The most such tokens of one document.
  Index most_learned() const {
    Index most = 0;
    for (Index i = 0; i < documents(); ++i) most = std::max<Index>(most, std::ranges::count(learn(i).subspan(1), 1));
    return most;
  }

  // Checks every value: the file is untrusted, and may have been made for another model.
  void require_vocabulary(Index vocab) const {
    constexpr Index none = INT64_MAX;
    Index first = none;
#pragma omp parallel for reduction(min : first)
    for (Index i = 0; i < token_count(); ++i) {
      if (tokens_[i] < 0 || tokens_[i] >= vocab || learn_[i] > 1) first = std::min(first, i);
    }
    if (first == none) return;
    require(learn_[first] <= 1, name_, ": \"learn\" of token ", first, " is ", +learn_[first], ", neither 0 nor 1",
            kRemedy);
    fail(name_, ": token ", first, " is ", tokens_[first], ", outside the model's vocabulary of ", vocab,
         "; was the data tokenised for another model, or is tokenizer.json another model's?");
  }

  // Identifies the data, so that a run cannot be resumed on different data.
  std::string fingerprint() const {
    std::uint64_t hash = 0;
#pragma omp parallel for reduction(^ : hash)
    for (Index i = 0; i < documents(); ++i)
      hash ^= document_hash(i, tokens(i), learn(i), old_.empty() ? old_ : part(old_, i),
                            groups() ? std::optional(advantage(i)) : std::nullopt);
    for (const TokenPart& part : parts)
      if (part.weight > 0) hash = mix(hash ^ std::bit_cast<std::uint64_t>(part.weight));
    return fingerprint_of(hash, documents(), kind_);
  }

  // Refuses a file that changed since it was opened, when it had this fingerprint.
  void require_unchanged(const std::string& fingerprint) const {
    if (!file_.mapping().was_written()) return;
    const bool same = this->fingerprint() == fingerprint;
    MappedFile::require_intact();
    require(same, path(), ": was changed during the run; restore it");
  }

 private:
  static constexpr const char* kRemedy = "; tokenise the data again";

  void read_parts() {
    const std::string stored = metadata("parts"), where = path() + ": \"parts\"";
    parts = {{name_, "", documents()}};
    if (stored.empty()) return;
    parts.clear();
    const Json list = parse_json(stored, where);
    require(list.is_array() && !list.empty(), where, ": is not a list", kRemedy);
    Index all = 0;
    for (const Json& entry : list) {
      const Fields part(entry, where);
      parts.push_back({part.get<std::string>("name"), part.get<std::string>("form"), part.get<Index>("documents"),
                       part.get<double>("weight"), part.get<Index>("apart", 0)});
      const auto& [name, form, count, weight, apart] = parts.back();
      require(0 < count && count <= documents() - all && weight >= 0 && std::isfinite(weight) &&
                  (weight > 0) == mixes() && 0 <= apart && apart < count,
              where, ": ", entry.dump(), " does not fit the file", kRemedy);
      all += count;
    }
    require(all == documents(), where, ": are ", all, " documents, but there are ", documents(), kRemedy);
  }

  void require_pairs() const {
    require(documents() % 2 == 0, path(), ": preferences are pairs of documents, but there are ", documents(), kRemedy);
    for (Index i = 0; i < documents(); ++i) {
      require(learns(i), path(), ": the ", i % 2 ? "rejected" : "chosen", " document of pair ", i / 2 + 1,
              " has no token to learn", kRemedy);
    }
  }

  void read_groups() {
    advantages_ = numbers<double>("advantages", "F64", 2);
    require(advantages_.size() == 2 * ends_.size(), path(), ": ", advantages_.size() / 2, " advantages for ",
            documents(), " completions", kRemedy);
    for (Index i = 0; i < documents(); ++i) {
      require(learns(i), path(), ": completion ", i + 1, " has no token to learn", kRemedy);
      require(is_advantage(advantage(i)), path(), ": the advantages of completion ", i + 1, ", ", advantage(i).plain,
              " and ", advantage(i).scaled, ", are out of range", kRemedy);
    }
    if (!file_.find("old")) return;
    old_ = numbers<float>("old", "F32");
    require(old_.size() == tokens_.size(), path(), ": ", old_.size(), " old log-probs for ", token_count(), " tokens",
            kRemedy);
    const auto bad = std::ranges::find_if_not(old_, is_log_probability);
    require(bad == old_.end(), path(), ": the old log-prob of token ", bad - old_.begin(), " is out of range", kRemedy);
  }

  bool learns(Index i) const {
    return std::ranges::any_of(learn(i).subspan(1), [](auto mark) { return mark; });
  }

  // A tensor [n], or [n, width].
  template <class T>
  std::span<const T> numbers(const char* name, const char* dtype, Index width = 1) const {
    const Tensor& tensor = file_.at(name);
    const bool fits = width == 1 ? tensor.shape.size() == 1 : tensor.shape.size() == 2 && tensor.shape[1] == width;
    require(tensor.dtype == dtype && fits, tensor.where, ": expected ", dtype,
            width > 1 ? " of two dimensions" : " of one dimension", ", got ", tensor.dtype, " of shape ",
            shown(tensor.shape), kRemedy);
    require(reinterpret_cast<std::uintptr_t>(tensor.data) % alignof(T) == 0, tensor.where,
            ": not aligned to its type; write the file with the safetensors library");
    return {reinterpret_cast<const T*>(tensor.data), static_cast<std::size_t>(tensor.count)};
  }
  template <class T>
  std::span<const T> part(std::span<const T> all, Index i) const {
    return all.subspan(begin(i), length(i));
  }

  SafetensorsFile file_;
  std::string name_;
  std::vector<Index> ends_;
  std::span<const std::int32_t> tokens_;
  std::span<const std::uint8_t> learn_;
  std::span<const double> advantages_;
  std::span<const float> old_;
  DataKind kind_ = DataKind::documents;
};

// Does the loss cover these tokens?
enum class InLoss : bool { no, yes };

// A document in memory.
struct Document {
  std::vector<std::int32_t> tokens;
  std::vector<std::uint8_t> learn;
  std::optional<Advantage> advantage = {};  // of a completion in a group
  std::vector<float> old = {};              // log-prob of the next token when sampled; empty: unknown

  void add(std::span<const std::int32_t> more, InLoss in_loss) {
    tokens.insert(tokens.end(), more.begin(), more.end());
    learn.resize(tokens.size(), in_loss == InLoss::yes);
  }
  Index learned() const { return std::count(learn.begin() + !learn.empty(), learn.end(), 1); }
};

// Document i of a file.
inline Document document(const TokenFile& file, Index i) {
  const auto all = [](auto part) { return std::vector(part.begin(), part.end()); };
  Document document{all(file.tokens(i)), all(file.learn(i))};
  if (file.groups()) document.advantage = file.advantage(i);
  if (!file.old().empty()) document.old = all(file.old().subspan(file.begin(i), document.tokens.size()));
  return document;
}

}  // namespace streambp
