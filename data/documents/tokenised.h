// Tokenises data files (JSON, plain text, llm.c's .bin, token files) into one token file, in the given order. All data
// must be of one kind: documents, preferences or groups. The examples of a file must have one form, such as messages.
//
// Blocks of lines are tokenised on all cores and keep their order. The result is cached under a key of the files, the
// tokenizer and the options.
#pragma once

#include <exception>

#include "data/documents/data_files.h"
#include "data/documents/encoder.h"
#include "data/documents/llmc_file.h"
#include "data/files/hash.h"
#include "data/files/results.h"
#include "data/files/tokenizer_file.h"
#include "data/progress.h"

namespace streambp {

struct DataOptions {
  ChatOptions chat = {};
  Learn learn = Learn::answers;  // the tokens in the loss
  bool skip_bad = false;         // skip lines that cannot be used
  OnProgress progress = {};
};

class Tokenising {
 public:
  Tokenising(const fs::path& model, const DataOptions& options, TokenWriter& writer)
      : model_(model), options_(options), writer_(writer) {}

  void add(const DataPart& part) {
    forms_.clear(), apart_ = 0;
    const Index before = writer_.documents();
    for (const fs::path& file : part.files) add(file);
    const Index documents = writer_.documents() - before;
    require(documents > 0, part.name, ": no documents found; ",
            skipped_ > 0 ? "examples were skipped, the first: " + first_skipped_ : "it is empty");
    std::string forms;
    for (const std::string& form : forms_) forms += (forms.empty() ? "" : "; ") + form;
    parts_.push_back(
        {{"name", part.name}, {"form", forms}, {"documents", documents}, {"weight", part.weight}, {"apart", apart_}});
  }

  DataKind kind() const { return form_ ? form_->kind : DataKind::documents; }
  const Json& parts() const { return parts_; }
  Index skipped() const { return skipped_; }
  const std::string& first_skipped() const { return first_skipped_; }
  // Messages that the chat template leaves out.
  std::string left_out() const {
    if (left_out_ == 0) return "";
    return "warning: of " + std::to_string(left_out_) + (left_out_ == 1 ? " example" : " examples") +
           " the chat template leaves out messages, which the model does not read, the first: " + first_left_out_ +
           "; check the roles";
  }

 private:
  void add(const fs::path& path) {
    const std::string extension = extension_of(path);
    if (extension == ".bin") {
      require_kind({}, path.string() + ": ");
      forms_.insert("tokens");
      add_bin_file(path, writer_);
    } else if (extension == ".safetensors") {
      const TokenFile file(path);
      file.require_vocabulary(INT32_MAX);
      forms_.insert("tokens");
      require_kind({file.kind(), !file.old().empty()}, path.string() + ": ");
      for (Index i = 0; i < file.documents(); ++i) writer_.add(document(file, i));
    } else if (holds_json(path)) {
      add_examples(path);
    } else {
      add_text(path);
    }
    progress(path, 1);
  }

  // Loaded on first use, because data that is already tokenised needs no tokenizer.
  const Encoder& encoder() {
    if (!encoder_) {
      tokenizer_ = read_tokenizer(model_);
      std::optional<Chat> chat;
      std::string no_chat;
      try {
        chat = Chat::of(model_, options_.chat);
      } catch (const Error& error) {
        if (!options_.chat.given.empty()) throw;
        no_chat = error.what();
      }
      encoder_.emplace(*tokenizer_, model_, std::move(chat), no_chat, options_.learn);
    }
    return *encoder_;
  }

  struct Form {
    DataKind kind = DataKind::documents;
    bool old = false;  // with old log-probs
  };

  // The first example sets the form. A different form is an error even with --skip-bad, because either could be wrong.
  void require_kind(const Form& form, const std::string& where) {
    if (!form_) form_ = form;
    constexpr const char* names[] = {"a document", "a preference", "a group"};
    require(form.kind == form_->kind, where, names[static_cast<int>(form.kind)], " among ",
            kDataKinds[static_cast<int>(form_->kind)], "; all data must be of one kind");
    require(form.old == form_->old, where, form.old ? "has" : "lacks",
            " \"old_logps\", unlike the examples before it; ", "give them for all or for none");
  }

  void add_text(const fs::path& path) {
    require_kind({}, path.string() + ": ");
    forms_.insert(kPlainText);
    std::string text = read_text(path, available_memory() / 16);  // its tokens take 13 bytes for each of its bytes
    try {
      require_data(is_utf8(text), "is not UTF-8; convert it, for example with iconv");
      for (const Document& d : encoder().encode({.kind = Example::text, .written = std::move(text)})) writer_.add(d);
    } catch (const BadData& error) {
      bad(path.string() + ": " + error.what());
    }
  }

  struct Line {
    std::string text, where;
    Form form = {};
    std::string form_name = {};
    std::vector<Document> documents = {};
    std::string error = {}, left_out = {};
  };

  void add_examples(const fs::path& path) {
    const Encoder& encoder = this->encoder();
    JsonValues lines(path);
    std::string form, first;  // of the file, and the place of its first example
    for (bool more = true; more;) {
      std::vector<Line> block;
      std::size_t bytes = 0;
      for (std::string line; bytes < (std::size_t{1} << 22) && (more = lines.next(line)); bytes += line.size() + 1)
        block.push_back({std::move(line), lines.where()});
      encode(encoder, block);
      Unfinished::check();
      for (const Line& line : block) {
        if (!line.error.empty()) {
          bad(line.where + line.error);
          continue;
        }
        require_kind(line.form, line.where);
        if (form.empty()) form = line.form_name, first = line.where.substr(0, line.where.size() - 2);
        require(line.form_name == form, line.where, "has ", line.form_name, ", but ", first, " has ", form,
                "; give each form its own file");
        if (!line.left_out.empty() && ++left_out_ == 1) first_left_out_ = line.where + line.left_out;
        for (const Document& document : line.documents) writer_.add(document);
        if (line.form.kind == DataKind::documents) apart_ += std::ssize(line.documents) - 1;
      }
      progress(path, lines.fraction());
    }
    if (!form.empty()) forms_.insert(form);
  }

  static void encode(const Encoder& encoder, std::vector<Line>& block) {
    std::exception_ptr failure;  // an error that is not caused by the data
#pragma omp parallel for schedule(dynamic)
    for (std::size_t i = 0; i < block.size(); ++i) {
      try {
        const Example example = parse_example(block[i].text);
        block[i].form = {example.kind == Example::preference ? DataKind::preferences
                         : example.kind == Example::group    ? DataKind::groups
                                                             : DataKind::documents,
                         !example.old.empty()};
        block[i].form_name = example.form;
        block[i].documents = encoder.encode(example);
        block[i].left_out = encoder.left_out(example);
      } catch (const BadData& error) {
        block[i].error = error.what();
      } catch (...) {
#pragma omp critical(streambp_tokenising)
        failure = std::current_exception();
      }
    }
    if (failure) std::rethrow_exception(failure);
  }

  void bad(const std::string& what) {
    require(options_.skip_bad, what, "; fix it, or skip such examples with --skip-bad");
    if (++skipped_ <= 3) first_skipped_ += (first_skipped_.empty() ? "" : "; ") + what;
  }

  void progress(const fs::path& path, double fraction) {
    if (options_.progress)
      options_.progress({"tokenising " + path.filename().string(), fraction, writer_.tokens_count()});
  }

  fs::path model_;
  DataOptions options_;
  TokenWriter& writer_;
  std::optional<Tokenizer> tokenizer_;
  std::optional<Encoder> encoder_;
  std::optional<Form> form_;     // empty until the first example
  std::set<std::string> forms_;  // of the current part
  Index apart_ = 0;              // documents that are further answers of an example, in the current part
  Json parts_ = Json::array();
  Index skipped_ = 0, left_out_ = 0;  // examples
  std::string first_skipped_;         // three of them
  std::string first_left_out_;
};

// A key of everything that the tokens depend on.
inline std::string data_key(const std::vector<DataPart>& data, const fs::path& model, const DataOptions& options) {
  Json key = {{"version", 8},
              {"chat", options.chat.given},
              {"trusts_messages", options.chat.trusts_messages},
              {"learn_all", options.learn == Learn::all},
              {"skip_bad", options.skip_bad}};
  for (const DataPart& part : data) {
    Json files = {part.name};
    for (const fs::path& file : part.files) files.push_back(file_key(file));
    key["parts"].push_back(files);
  }
  if (!options.chat.arguments.empty()) key["arguments"] = options.chat.arguments;
  if (fs::is_regular_file(options.chat.given)) key["chat"] = file_key(options.chat.given);
  if (Chat::reads_date(model, options.chat.given)) key["date"] = options.chat.date;
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
                           "chat_template.json", "generation_config.json", "config.json"}) {
    const auto path = model / name;
    if (has_file(path) && !is_gguf(model)) key["model"][name] = file_key(path);
  }
  if (is_gguf(model)) key["model"] = file_key(model);
  return key.dump();
}

// "a.jsonl, b.txt"
inline std::string listed(const std::vector<DataPart>& data) {
  std::string all;
  for (const DataPart& part : data) all += (all.empty() ? "" : ", ") + part.name;
  return all;
}

inline void write_tokens(const std::vector<DataPart>& data, const fs::path& model, const DataOptions& options,
                         const fs::path& out) {
  require(!data.empty(), "no data files; give at least one with --data");
  const std::string key = data_key(data, model, options);
  const std::string from = listed(data);
  TokenWriter writer(out);
  Tokenising tokenising(model, options, writer);
  for (const DataPart& part : data) tokenising.add(part);
  writer.finish({{"format", "streambp tokens"},
                 {"written_by", kWrittenBy},
                 {"kind", kDataKinds[static_cast<int>(tokenising.kind())]},
                 {"made_from", from},
                 {"parts", text_of(tokenising.parts())},
                 {"key", key},
                 {"fingerprint", writer.fingerprint(tokenising.kind())},
                 {"skipped", std::to_string(tokenising.skipped())},
                 {"first_skipped", tokenising.first_skipped()},
                 {"left_out", tokenising.left_out()}});
}

// Creates a directory that only this user can read, if there is none.
inline void create_private_directories(const fs::path& path) {
  std::error_code error;
  if (path.has_parent_path()) fs::create_directories(path.parent_path(), error);
  if (!error && mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) error.assign(errno, std::generic_category());
  require(!error, path.string(), ": cannot create the directory: ", error.message(), "; choose another place");
}

// The token cache shared by all runs.
inline fs::path cache_directory() {
  const char *cache = std::getenv("XDG_CACHE_HOME"), *home = std::getenv("HOME");
  if (cache && *cache) return fs::path(cache) / "streambp";
  return (home && *home ? fs::path(home) / ".cache" : temporary_directory()) / "streambp";
}

// One token file, which is used as it is.
inline bool holds_tokens(const std::vector<DataPart>& data) {
  return data.size() == 1 && data[0].files.size() == 1 && extension_of(data[0].files[0]) == ".safetensors";
}

// The data as tokens. A token file is used as it is; other data is tokenised into the directory `cache`, unless it is
// cached there. `held_out`: parts after the data, for evaluation only.
inline TokenFile tokenised(std::vector<DataPart> data, const fs::path& model, const DataOptions& options,
                           const fs::path& cache, const std::vector<DataPart>& held_out = {}) {
  data.insert(data.end(), held_out.begin(), held_out.end());
  if (holds_tokens(data)) return TokenFile(data[0].files[0]);
  const auto open = [&](const fs::path& path) {
    TokenFile file(path, listed(data));
    for (std::size_t i = 0; i < file.parts.size(); ++i) file.parts[i].weight = data.at(i).weight;
    file.held_out = held_out.size();
    return file;
  };
  const std::string key = data_key(data, model, options);
  const auto path = cache / named_by_hash("tokens", key);
  if (fs::exists(path)) {
    try {
      TokenFile file(path);
      if (file.metadata("key") == key && file.metadata("fingerprint") == file.fingerprint()) return open(path);
    } catch (const Error&) {  // damaged: tokenise again
    }
  }
  create_private_directories(cache);
  std::vector<DataPart> unweighted = data;  // cached tokens can be mixed in other ways
  for (DataPart& part : unweighted) part.weight = 0;
  write_tokens(unweighted, model, options, path);
  return open(path);
}

}  // namespace streambp
