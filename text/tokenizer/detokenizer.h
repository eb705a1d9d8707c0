// The field "decoder" of a tokenizer.json: from tokens to text, step by step.
//
// Generation prints text before the last token is known, so a step is stateful: for the next tokens, it returns the
// part of the text that no later token can change. At the closed end, it returns the rest.
#pragma once

#include <charconv>
#include <functional>

#include "text/tokenizer/byte_characters.h"
#include "text/tokenizer/components.h"

namespace streambp {

class Detokenizer {
 public:
  explicit Detokenizer(const Fields& file) {
    if (!file.has("decoder")) {
      steps_.push_back([begun = false](Tokens& tokens, TextEnd) mutable {
        for (std::string& token : tokens) token = (std::exchange(begun, true) ? " " : "") + token;
      });
    }
    for_each_component(file, "decoder", "decoders", [&](const std::string& type, const Fields& f) { read(type, f); });
  }

  // The text that is complete after these tokens.
  std::string add(std::vector<std::string> tokens, TextEnd end) {
    for (const Step& step : steps_) step(tokens, end);
    std::string text;
    for (const std::string& token : tokens) text += token;
    return text;
  }

 private:
  using Tokens = std::vector<std::string>;
  using Step = std::function<void(Tokens&, TextEnd)>;

  void read(const std::string& type, const Fields& f) {
    if (type == "ByteLevel") {
      f.known({"type", "add_prefix_space", "trim_offsets", "use_regex"});  // no effect on decoding
      add_step(byte_level());
      fused_ = true;
    } else if (type == "Fuse") {
      f.known({"type"});
      fused_ = true;
    } else if (type == "ByteFallback") {
      f.known({"type"});
      add_step(byte_fallback());
    } else if (type == "Replace") {
      add_step([replacement = Replacement(f, growth_)](Tokens& tokens, TextEnd) {
        for (std::string& token : tokens) token = replacement(token);
      });
    } else if (type == "Metaspace") {
      read_metaspace(f);
    } else if (type == "Strip") {
      read_strip(f);
    } else {
      fail(f.file, ": a decoder of type ", quote(type),
           " is not supported; ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace and Sequence are");
    }
  }

  // After Fuse and ByteLevel there is a single token, which arrives in pieces. Most steps have to wait for all of it.
  void add_step(Step step) {
    if (fused_) {
      steps_.push_back([whole = std::string()](Tokens& tokens, TextEnd end) mutable {
        for (const std::string& piece : tokens) whole += piece;
        tokens.clear();
        if (end == TextEnd::closed) tokens.push_back(whole);
      });
    }
    steps_.push_back(std::move(step));
  }

  static Step byte_level() {
    return [pending = std::string()](Tokens& tokens, TextEnd end) mutable {
      for (const std::string& token : tokens) pending += bytes_of(token).value_or(token);
      std::string text;
      const std::size_t left = append_repaired(text, pending, end);
      pending.erase(0, pending.size() - left);
      tokens = {text};
    };
  }

  // Tokens such as "<0x41>" are bytes. A run of them becomes text if it is UTF-8, otherwise one U+FFFD per byte, so the
  // step waits for the end of the run.
  static Step byte_fallback() {
    return [bytes = std::string()](Tokens& tokens, TextEnd end) mutable {
      Tokens out;
      const auto flush = [&] {
        if (is_utf8(bytes)) {
          out.push_back(bytes);
        } else {
          for (std::size_t i = 0; i < bytes.size(); ++i) out.push_back("\uFFFD");
        }
        bytes.clear();
      };
      for (std::string& token : tokens) {
        if (const int byte = byte_value(token); byte >= 0) {
          bytes += static_cast<char>(byte);
        } else {
          if (!bytes.empty()) flush();
          out.push_back(std::move(token));
        }
      }
      if (end == TextEnd::closed && !bytes.empty()) flush();
      tokens = std::move(out);
    };
  }

  // The value of "<0x41>", or -1. Accepts + as the first digit, as the library does.
  static int byte_value(std::string_view token) {
    if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
    std::uint8_t value = 0;
    const auto [end, error] = std::from_chars(&token[token[3] == '+' ? 4 : 3], &token[5], value, 16);
    return error == std::errc() && end == &token[5] ? value : -1;
  }

  // The replacement becomes a space. In the first token it is removed, because encoding may have added it.
  void read_metaspace(const Fields& f) {
    f.known({"type", "replacement", "prepend_scheme", "add_prefix_space", "split", "str_rep"});
    const bool prefix =
        f.get<std::string>("prepend_scheme", "always") != "never" && f.get<bool>("add_prefix_space", true);
    add_step([pattern = Pattern::literal(read_space(f)), begun = !prefix](Tokens& tokens, TextEnd) mutable {
      for (std::string& token : tokens) token = replaced(pattern, token, std::exchange(begun, true) ? " " : "");
    });
  }

  // Removes the content up to `start` times from the beginning of a token and up to `stop` times from its end.
  void read_strip(const Fields& f) {
    f.known({"type", "content", "start", "stop"});
    const auto content = f.get<std::string>("content");
    const auto start = f.get<std::int64_t>("start"), stop = f.get<std::int64_t>("stop");
    require(!content.empty() && first_character(content).bytes == content.size(), f.file, ": content ", quote(content),
            " is not one character");
    require(start >= 0 && stop >= 0, f.file, ": start and stop must not be negative");
    if (!fused_ || stop > 0) {
      return add_step([=](Tokens& tokens, TextEnd) {
        for (std::string& token : tokens) {
          std::string_view rest = token;
          for (std::int64_t i = 0; i < stop && rest.ends_with(content); ++i) rest.remove_suffix(content.size());
          for (std::int64_t i = 0; i < start && rest.starts_with(content); ++i) rest.remove_prefix(content.size());
          token = std::string(rest);
        }
      });
    }
    steps_.push_back([=, left = start](Tokens& tokens, TextEnd) mutable {
      for (std::string& piece : tokens) {
        std::string_view rest = piece;
        for (; left > 0 && rest.starts_with(content); --left) rest.remove_prefix(content.size());
        if (!rest.empty()) left = 0;
        piece = std::string(rest);
      }
    });
  }

  std::vector<Step> steps_;
  bool fused_ = false;
  Growth growth_;
};

}  // namespace streambp
