// The micro-batches of a training step that another program recorded (scripts/dump_gradients.py), in safetensors files.
// A file has one micro-batch, or several as 0.input_ids, 1.input_ids, ...; each rank writes one file. A micro-batch is
//
//   input_ids        tokens: rows x length, or length
//   labels           the token itself where it is learned, negative where it is not; the model shifts them by one
//                    (metadata "labels": "shifted": the label of a token is the token to predict after it)
//   attention_mask   optional: 0 is padding; in a packed row, the number of the token's document
//   document_ids     optional: another number, another document
//   cu_seqlens       optional: where documents begin in a packed row, and its end
//   position_ids     optional: where they do not increase, a document begins, unless one of the above says where
//   loss_weights     optional: factors of the learned tokens; the loss is the weighted mean
//   weights          optional, instead of all this: d loss / d log-prob of each label, for any loss
//
// The loss is the mean over all learned tokens of the step (metadata "reduction": "sum": their sum).
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "data/files/safetensors.h"
#include "model/batch.h"

namespace streambp {

enum class Reduction { mean, sum, given };  // given: d loss / d log-prob is in the file

struct RecordedBatch {
  Batch batch;                        // advantages: the factor of each target, or what is given
  std::vector<std::int32_t> rows;     // the row of each token
  std::vector<std::int32_t> columns;  // and its place there
  std::size_t file = 0;               // the rank that recorded it
  Index padded_size = 0;
};

struct RecordedStep {
  std::vector<RecordedBatch> batches;
  Reduction reduction = Reduction::mean;
  std::size_t files = 0;
  std::string bounds = "each row is a document";  // how they are known
  Index outside = 0;                              // labels of documents' first tokens, which are not learned

  Index targets() const {
    Index sum = 0;
    for (const RecordedBatch& b : batches) sum += b.batch.target_count();
    return sum;
  }
  // The number of positions that the longest document has.
  Index longest() const {
    Index most = 0;
    for (const RecordedBatch& b : batches) most = std::max(most, b.batch.longest());
    return most;
  }
};

// Writes a batch in this form: a row of documents, with shifted labels.
inline void write_recorded(const fs::path& path, const Batch& batch, const std::string& written_by) {
  SafetensorsWriter writer(path, {{"labels", "shifted"}, {"written_by", written_by}});
  const std::vector<Index> shape = {1, batch.size()};
  for (const auto& [name, numbers] : {std::pair{"input_ids", &batch.tokens},
                                      {"labels", &batch.targets},
                                      {"position_ids", &batch.positions},
                                      {"document_ids", &batch.key_begin}})
    writer.add(name, "I32", shape, numbers->data(), numbers->size() * sizeof(std::int32_t));
  writer.finish();
}

// A micro-batch's tensors, checked.
class RecordedTensors {
 public:
  RecordedTensors(const SafetensorsFile& file, const std::string& prefix) : file_(file), prefix_(prefix) {
    const Tensor& ids = file.at(prefix + "input_ids");
    require(!ids.shape.empty() && ids.shape.size() <= 2, ids.where, ": has shape ", shown(ids.shape),
            ", but a micro-batch is rows x length");
    length = ids.shape.back(), rows = ids.shape.size() == 2 ? ids.shape[0] : 1;
    require(ids.count > 0, ids.where, ": is empty");
    require(ids.count <= kMostTokens, ids.where, ": ", ids.count, " tokens are too many");
  }

  Index length, rows;

  std::string where() const { return file_.path().string() + prefix_; }
  std::string place(std::size_t i) const {
    const auto at = static_cast<Index>(i);
    return "row " + std::to_string(at / length) + ", column " + std::to_string(at % length);
  }
  bool has(const std::string& name) const { return file_.find(prefix_ + name); }
  const Tensor& tensor(const std::string& name) const { return file_.at(prefix_ + name); }
  // A number for each token.
  template <class T>
  std::vector<T> numbers(const std::string& name) const {
    const Tensor& found = tensor(name);
    const bool one_row = name == "position_ids" && found.count == length && rows > 1;  // for all rows
    require(!found.shape.empty() && found.shape.back() == length && (found.count == rows * length || one_row),
            found.where, ": has shape ", shown(found.shape), ", but input_ids has ", shown(tensor("input_ids").shape));
    std::vector<T> numbers = read_numbers<T>(found);
    for (Index row = 1; row < rows && one_row; ++row)
      numbers.insert(numbers.end(), numbers.begin(), numbers.begin() + length);
    return numbers;
  }
  // Where documents begin, and the end.
  std::vector<std::int64_t> bounds() const {
    const Tensor& found = tensor("cu_seqlens");
    require(found.count <= rows * length + 1, found.where, ": has more bounds than tokens");
    const std::vector<std::int64_t> bounds = read_numbers<std::int64_t>(found);
    require(!bounds.empty() && bounds.front() == 0 && bounds.back() == rows * length, found.where,
            ": must begin with 0 and end with ", rows * length, ", the number of tokens");
    require(std::ranges::adjacent_find(bounds, std::greater_equal<>()) == bounds.end(), found.where,
            ": does not increase, so a document is empty");
    return bounds;
  }

 private:
  static constexpr Index kMostTokens = Index{1} << 26;

  template <class T>
  static std::vector<T> read_numbers(const Tensor& tensor) {
    require(dtype_size(tensor.dtype) > 0, tensor.where, ": cannot read type ", tensor.dtype);
    std::vector<T> numbers(static_cast<std::size_t>(tensor.count));
    if (std::is_integral_v<T> && tensor.dtype == "BOOL") {
      std::transform(tensor.data, tensor.data + tensor.bytes, numbers.begin(), [](std::byte b) { return T(b); });
    } else {
      read(tensor, numbers.data());
    }
    return numbers;
  }

  const SafetensorsFile& file_;
  const std::string prefix_;
};

// Reads a step's files, one for each rank.
class RecordedStepReader {
 public:
  explicit RecordedStepReader(const Config& config) : config_(config) { config_.rope_scaling.longest = kLargestSize; }

  RecordedStep read(const std::vector<std::string>& paths) {
    for (auto path = paths.begin(); path != paths.end(); ++path) {
      std::error_code unknown;  // of a file that is not there
      const auto same = [&](const std::string& other) { return fs::equivalent(*path, other, unknown); };
      require(std::none_of(paths.begin(), path, same), *path, ": --batch names this file twice");
      add(SafetensorsFile(*path));
    }
    double factors = 0;
    for (const RecordedBatch& b : step_.batches)
      for (const double factor : b.batch.advantages) factors += std::abs(factor);
    require(factors > 0, paths[0],
            ": no token of the step is learned: labels are negative, of documents' first tokens, ",
            "or have a weight of 0");
    return std::move(step_);
  }

 private:
  void add(const SafetensorsFile& file) {
    const std::size_t before = step_.batches.size();
    const auto says = [&](const char* name, const std::string& usual, const std::string& other) {
      const auto found = file.metadata().find(name);
      const std::string value = found == file.metadata().end() ? usual : found->second;
      require(value == usual || value == other, file.path().string(), ": metadata ", quote(name), ": ", quote(value),
              " is neither ", quote(usual), " nor ", quote(other));
      return value == other;
    };
    const bool shifted = says("labels", "unshifted", "shifted"), summed = says("reduction", "mean", "sum");
    if (file.find("input_ids")) add(RecordedTensors(file, ""), shifted, summed);
    for (Index i = 0; file.find(std::to_string(i) + ".input_ids"); ++i)
      add(RecordedTensors(file, std::to_string(i) + "."), shifted, summed);
    require(step_.batches.size() > before, file.path().string(), ": has neither \"input_ids\" nor \"0.input_ids\"");
    for (const auto& [name, tensor] : file.tensors()) {
      const std::size_t dot = name.find('.');
      const std::string prefix = dot == std::string::npos ? "" : name.substr(0, dot + 1);
      require(kTensors.contains(name.substr(prefix.size())) && read_.contains(file.path().string() + prefix),
              tensor.where, " is not a tensor of a micro-batch; these are ", join(kTensors),
              ", each after 0., 1., ...");
    }
    ++step_.files;
  }

  void add(const RecordedTensors& from, bool shifted, bool summed) {
    read_.insert(from.where());
    const bool given = from.has("weights");
    const Reduction reduction = given ? Reduction::given : summed ? Reduction::sum : Reduction::mean;
    require(step_.batches.empty() || step_.reduction == reduction, from.tensor("input_ids").where,
            ": all micro-batches of a step must have the same kind of loss");
    step_.reduction = reduction;
    RecordedBatch result;
    result.file = step_.files, result.padded_size = from.rows * from.length;
    const auto tokens = from.numbers<std::int32_t>("input_ids"), labels = from.numbers<std::int32_t>("labels");
    const std::vector<bool> begins = document_begins(from);
    std::vector<std::int32_t> positions, mask(tokens.size(), 1);
    std::vector<double> factors(tokens.size(), 1);
    if (from.has("position_ids")) positions = from.numbers<std::int32_t>("position_ids");
    if (from.has("attention_mask")) mask = from.numbers<std::int32_t>("attention_mask");
    const char* factor = given ? "weights" : "loss_weights";
    if (from.has(factor)) factors = from.numbers<double>(factor);
    Batch& batch = result.batch;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const auto row = static_cast<std::int32_t>(static_cast<Index>(i) / from.length);
      check(from, i, tokens[i], labels[i], factors[i], factor, mask[i]);
      if (mask[i] == 0) continue;
      const auto here = static_cast<std::int32_t>(batch.size());
      const bool new_row = here == 0 || result.rows.back() != row, first = begins[i] || new_row;
      if (!new_row && mask[i - 1] == 0)
        fail(from.tensor("attention_mask").where, ": ", from.place(i), ": tokens before it in its row are masked, and ",
             "tokens before those are not; padding must be at the ends of rows");
      if (first && !shifted && labels[i] >= 0) ++step_.outside;
      if (!first && !shifted) batch.targets.back() = std::max(labels[i], -1), batch.advantages.back() = factors[i];
      batch.tokens.push_back(tokens[i]);
      batch.targets.push_back(shifted ? std::max(labels[i], -1) : -1);
      batch.advantages.push_back(shifted ? factors[i] : 0);
      batch.key_begin.push_back(first ? here : batch.key_begin.back());
      batch.positions.push_back(!positions.empty() ? positions[i] : here - batch.key_begin.back());
      result.rows.push_back(row);
      result.columns.push_back(static_cast<std::int32_t>(static_cast<Index>(i) % from.length));
    }
    if (batch.size() == 0) fail(from.tensor("attention_mask").where, ": masks all tokens");
    for (std::size_t t = 0; t < batch.targets.size(); ++t)
      if (batch.targets[t] < 0) batch.advantages[t] = 0;
    try {
      validate(config_, batch);
    } catch (const Error& error) {
      fail(from.tensor("input_ids").where, ": ", error.what());
    }
    step_.batches.push_back(std::move(result));
  }

  void check(const RecordedTensors& from, std::size_t i, std::int32_t token, std::int32_t label, double factor,
             const char* name_of_factor, std::int32_t mask) const {
    if (token < 0 || token >= config_.vocab)
      fail(from.tensor("input_ids").where, ": ", from.place(i), ": token ", token,
           " is outside the model's vocabulary of ", config_.vocab);
    if (label >= config_.vocab)
      fail(from.tensor("labels").where, ": ", from.place(i), ": label ", label,
           " is outside the model's vocabulary of ", config_.vocab, "; labels that are not learned are negative");
    if (mask == 0 && label >= 0)
      fail(from.tensor("labels").where, ": ", from.place(i), ": padding has the label ", label,
           ", so it is learned; set the labels of padding to -100, or drop attention_mask if these are tokens");
    if (!std::isfinite(factor)) fail(from.tensor(name_of_factor).where, ": ", from.place(i), ": is ", factor);
    if (std::abs(factor) > kLargestFactor)
      fail(from.tensor(name_of_factor).where, ": ", from.place(i), ": a factor of ", factor,
           " is too large for a gradient in float32; the largest is ", kLargestFactor);
    if (factor < 0 && step_.reduction != Reduction::given)
      fail(from.tensor(name_of_factor).where, ": ", from.place(i), ": a factor of ", factor, " is negative");
  }

  // Whether a document begins at each token, beside those at the beginning of a row and after padding.
  std::vector<bool> document_begins(const RecordedTensors& from) {
    std::vector<bool> begins(static_cast<std::size_t>(from.rows * from.length));
    std::vector<std::int64_t> mask(begins.size(), 1);
    if (from.has("attention_mask")) mask = from.numbers<std::int64_t>("attention_mask");
    // Where `holds` for a token and the one before it. Returns whether it does anywhere.
    const auto where = [&](const char* name, auto&& holds) {
      const auto numbers = from.numbers<std::int64_t>(name);
      bool any = false;
      for (std::size_t i = 1; i < numbers.size(); ++i) {
        const bool inside = static_cast<Index>(i) % from.length > 0 && mask[i - 1] != 0 && mask[i] != 0;
        begins[i] = inside && holds(numbers[i - 1], numbers[i]);
        any = any || begins[i];
      }
      if (any) step_.bounds = std::string("documents from ") + name;
      return any;
    };
    if (from.has("cu_seqlens")) {
      for (const std::int64_t begin : from.bounds())
        if (begin < std::ssize(begins)) begins[static_cast<std::size_t>(begin)] = true;
      step_.bounds = "documents from cu_seqlens";
    } else if (from.has("document_ids")) {
      where("document_ids", std::not_equal_to<>());
    } else if ((!from.has("attention_mask") || !where("attention_mask", std::not_equal_to<>())) &&
               from.has("position_ids")) {
      where("position_ids", std::greater_equal<>());
    }
    return begins;
  }

  static constexpr double kLargestFactor = 1e20;
  static const inline std::set<std::string> kTensors = {"input_ids",  "labels",       "attention_mask", "document_ids",
                                                        "cu_seqlens", "position_ids", "loss_weights",   "weights"};

  Config config_;
  RecordedStep step_;
  std::set<std::string> read_;  // which micro-batches
};

}  // namespace streambp
