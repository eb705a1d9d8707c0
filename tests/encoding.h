// The fixture for tests of tokenising: a model directory with a small tokenizer, and data files.
#pragma once

#include "data/documents/tokenised.h"
#include "tests/chat_models.h"

namespace streambp {

class Encoding : public TemporaryDirectory {
 protected:
  void model(const std::string& tokenizer) {
    make_tokenizer_directory(dir / "model", tokenizer);
    tokens_ = read_tokenizer(dir / "model");
  }
  Encoder encoder(const std::string& chat = "", Learn learn = Learn::answers) const {
    std::optional<Chat> layout;
    if (!chat.empty()) layout = Chat::of(dir / "model", {chat == "chatml" ? chat : chat_template(chat), "2026-11-25"});
    return Encoder(*tokens_, dir / "model", layout, "no template here", learn);
  }
  std::string text(std::span<const std::int32_t> tokens) const { return tokens_->decode(tokens); }
  std::string learned(const Document& document) const {
    Tokens tokens;
    for (std::size_t i = 0; i < document.tokens.size(); ++i) {
      if (document.learn[i]) tokens.push_back(document.tokens[i]);
    }
    return text(tokens);
  }
  Index count(const Document& document, const char* token) const {
    return std::count(document.tokens.begin(), document.tokens.end(), tokens_->find(token).value());
  }
  TokenFile tokenise(const std::vector<fs::path>& data, const DataOptions& options = {}) {
    return tokenised(data_parts({data.begin(), data.end()}), dir / "model", options, dir / "cache");
  }
  std::string refusal(const std::vector<fs::path>& data, const DataOptions& options = {}) {
    return error_of([&] { tokenise(data, options); });
  }

  std::optional<Tokenizer> tokens_;
};

}  // namespace streambp
