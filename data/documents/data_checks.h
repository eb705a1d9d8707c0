// What of the data is learned, and signs that a model cannot learn it. Each is a warning with its remedy.
#pragma once

#include "data/documents/tokenised.h"
#include "data/files/model_directory.h"

namespace streambp {

class DataChecks {
 public:
  DataChecks(const TokenFile& file, const fs::path& model, const DataOptions& options)
      : file_(file), model_(model), options_(options) {
    if (!has_file(model / "tokenizer.json")) return;
    tokenizer_ = read_tokenizer(model);
    const std::vector<std::int32_t> stop = read_eos_tokens(model).ids;
    std::vector<bool> ends;
    for (std::int32_t id = 0; id < tokenizer_->size(); ++id)
      ends.push_back(tokenizer_->special(id) || std::ranges::count(stop, id) > 0);
    count(ends);
  }

  // The beginning of what is learned first.
  std::string first_learned() const {
    if (!tokenizer_) return "";
    const auto learn = file_.learn(0);
    const auto first = std::ranges::find(learn.subspan(1), 1) - learn.begin();
    const auto end = std::find(learn.begin() + first, learn.end(), 0) - learn.begin();
    StreamingDecoder decoder(*tokenizer_);  // whole characters
    std::string text;
    for (auto t = first; t < std::min(end, first + 100); ++t)
      text += decoder.add(file_.tokens(0)[static_cast<std::size_t>(t)]);
    if (end <= first + 100) text += decoder.finish();
    const std::size_t sentence = text.find_first_of(".!?\n");
    return excerpt(text.substr(0, sentence == text.npos ? sentence : sentence + 1));
  }

  std::vector<std::string> warnings() const {
    std::vector<std::string> all;
    const auto warn = [&](bool condition, const std::string& text) {
      if (condition) all.push_back("warning: " + text);
    };
    const bool tokens = form("tokens") || form(""), chats = form("messages") || form("conv") || form("instruction");
    const Index learned = file_.learned_count();
    Index apart = 0;
    for (const TokenPart& part : file_.parts) apart += part.apart;
    if (apart > 0)
      all.push_back(std::to_string(file_.documents()) + " documents from " + std::to_string(file_.documents() - apart) +
                    " examples: an answer is a separate document where the chat template writes it differently once "
                    "others follow");
    warn(single_ == file_.documents(), "every document has only one token in the loss, so there is little to learn");
    warn(chats && options_.learn == Learn::answers && learned == file_.token_count() - file_.documents(),
         "every token of the conversations is in the loss, questions too; see streambp tokenize --show 3");
    warn(tokenizer_ && !tokens && ended_ == 0,
         "no document has an end token in the loss, so the model does not learn to stop; end the template's "
         "{% generation %} blocks after the end of the turn, or the texts with the end token");
    if (!tokenizer_) return all;
    for (const auto& [open, close] : kReasoningMarks)
      if (chats && uses(open) && uses(close))
        all.push_back(std::string("reasoning: ") + open + " and " + close + " in answers are tokens, not text");
    if (chats) check_template(warn);
    check_embeddings(warn);
    return all;
  }

 private:
  bool form(const std::string& begin) const {
    return std::ranges::any_of(file_.parts, [&](const TokenPart& part) {
      return begin.empty() ? part.form.empty() : part.form.starts_with(begin) || part.form.ends_with("as " + begin);
    });
  }

  bool uses(const char* token) const {
    const auto found = tokenizer_->added().find(token);
    return found != tokenizer_->added().end() && used_[static_cast<std::size_t>(found->second)];
  }

  void count(const std::vector<bool>& ends) {
    used_.assign(ends.size(), false);
    for (Index i = 0; i < file_.documents(); ++i) {
      const auto learn = file_.learn(i);
      const auto tokens = file_.tokens(i);
      const auto has = [&](std::int32_t id) { return 0 <= id && std::cmp_less(id, ends.size()); };
      Index learned = 0;
      bool ended = false;
      for (std::size_t t = 0; t < tokens.size(); ++t) {
        if (!has(tokens[t])) continue;
        const auto id = static_cast<std::size_t>(tokens[t]);
        used_[id] = true;
        if (t == 0 || !learn[t]) continue;
        ++learned;
        ended = ended || ends[id];
      }
      single_ += learned == 1, ended_ += ended;
    }
  }

  template <class Warn>
  void check_template(const Warn& warn) const {
    const std::string own = read_template(model_).text;
    if (own.empty() && options_.chat.given.empty()) return;  // the data are tokens already
    const Chat chat = Chat::of(model_, options_.chat);
    warn(!own.empty() && own != chat.source(),
         "--chat " + options_.chat.given + " replaces the model's chat template, which it was trained with");
    RenderedChat text;
    try {
      text = chat.render({.messages = {{"user", "u"}, {"assistant", "a"}}});
    } catch (const BadData&) {  // the template wants other conversations
      return;
    }
    for (std::size_t begin = 0; (begin = text.text.find("<|", begin)) != std::string::npos; ++begin) {
      const std::size_t end = text.text.find("|>", begin);
      if (end == std::string::npos) break;
      const std::string marker = text.text.substr(begin, end + 2 - begin);
      if (marker.find_first_of(" \n", 0) != std::string::npos || tokenizer_->find(marker)) continue;
      return warn(true, "the chat template writes " + quote(marker) +
                            ", which is no token of this model, so the model reads it as several; use the model's "
                            "own template");
    }
  }

  // Rows of zeros, or equal rows, were never trained.
  template <class Warn>
  void check_embeddings(const Warn& warn) const {
    const bool weights = is_gguf(model_) || fs::exists(model_ / "model.safetensors") ||
                         fs::exists(model_ / "model.safetensors.index.json");
    if (!has_file(model_ / "config.json") || !weights) return;  // a tokenizer alone
    const Config c = read_config(model_);
    const ModelFiles files(model_, c.root);
    const Tensor& table = files.embedding(c);
    std::map<std::vector<float>, std::vector<std::int32_t>> rows;
    for (const auto& [name, id] : tokenizer_->added()) {
      if (id >= c.vocab || table.shape != std::vector<std::int64_t>{c.vocab, c.hidden}) continue;
      std::vector<float> row(static_cast<std::size_t>(c.hidden));
      read(table, id * c.hidden, c.hidden, row.data());
      rows[std::move(row)].push_back(id);
    }
    std::set<std::int32_t> untrained;
    for (const auto& [row, ids] : rows) {
      const bool zero = std::ranges::all_of(row, [](float x) { return std::abs(x) <= 1e-16f; });
      for (const std::int32_t id : ids)
        if (used_[static_cast<std::size_t>(id)] && (zero || ids.size() > 1)) untrained.insert(id);
    }
    std::string names;
    for (const std::int32_t id : untrained) names += (names.empty() ? "" : ", ") + quote(tokenizer_->decode({&id, 1}));
    warn(!names.empty(),
         "the data have " + names +
             ", but the model was never trained on it: the embedding is zero or "
             "that of other tokens; use a chat template with tokens that the model knows, or train the embedding, too");
  }

  const TokenFile& file_;
  const fs::path model_;
  const DataOptions& options_;
  std::optional<Tokenizer> tokenizer_;
  Index single_ = 0, ended_ = 0;  // documents with one token in the loss; with an end token in it
  std::vector<bool> used_;        // tokens that the data have
};

}  // namespace streambp
