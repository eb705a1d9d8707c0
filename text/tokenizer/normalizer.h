// The field "normalizer" of a tokenizer.json: changes a text before it is split into words.
#pragma once

#include <functional>

#include "text/tokenizer/components.h"
#include "text/tokenizer/normal_forms.h"

namespace streambp {

// Whether a text starts a document or continues one. Nothing is prepended to a continuation.
enum class TextStart { beginning, continuation };

class Normalizer {
 public:
  explicit Normalizer(const Fields& file) {
    for_each_component(file, "normalizer", "normalizers",
                       [&](const std::string& type, const Fields& f) { steps_.push_back(read(type, f)); });
  }

  // True if a step can remove the first character.
  bool moves_beginning() const { return moves_beginning_; }

  // Returns `text` itself or a view of `buffer`.
  std::string_view apply(std::string_view text, TextStart start, std::string& buffer) const {
    for (const Step& step : steps_) {
      if (!text.empty()) text = step(text, start, buffer);
    }
    return text;
  }

 private:
  // Returns its argument or a view of the buffer. The argument may already be a view of the buffer.
  using Step = std::function<std::string_view(std::string_view, TextStart, std::string&)>;

  Step read(const std::string& type, const Fields& f) {
    if (type == "NFC") return read_normal_form(f, NormalForm::nfc);
    if (type == "NFD") return read_normal_form(f, NormalForm::nfd);
    if (type == "NFKC") return read_normal_form(f, NormalForm::nfkc);
    if (type == "NFKD") return read_normal_form(f, NormalForm::nfkd);
    if (type == "Lowercase") {
      growth_.multiply(1.5, f);  // U+023A has 2 bytes, its lowercase letter 3
      return read_function(f, lowercase);
    }
    if (type == "StripAccents") {
      moves_beginning_ = true;
      return read_function(f, without_marks);
    }
    if (type == "Prepend") return read_prepend(f);
    if (type == "Replace") return read_replace(f);
    if (type == "Strip") return read_strip(f);
    fail(f.file, ": a normalizer of type ", quote(type),
         " is not supported; NFC, NFD, NFKC, NFKD, Lowercase, StripAccents, Prepend, Replace, Strip and Sequence "
         "are");
  }

  Step read_normal_form(const Fields& f, NormalForm form) {
    f.known({"type"});
    growth_.multiply(longest_expansion(form), f);
    return [form](std::string_view text, TextStart, std::string& buffer) {
      return surely_normal(form, text) ? text : buffer = normalized(form, text);
    };
  }

  static Step read_function(const Fields& f, std::string (*function)(std::string_view)) {
    f.known({"type"});
    return [function](std::string_view text, TextStart, std::string& buffer) -> std::string_view {
      return buffer = function(text);
    };
  }

  static Step read_prepend(const Fields& f) {
    f.known({"type", "prepend"});
    return [prefix = f.get<std::string>("prepend")](std::string_view text, TextStart start, std::string& buffer) {
      return start == TextStart::continuation ? text : buffer = prefix + std::string(text);
    };
  }

  Step read_replace(const Fields& f) {
    const Replacement replacement(f, growth_);
    moves_beginning_ = moves_beginning_ || !replacement.pattern.one_character() || replacement.content.empty();
    return [replacement](std::string_view text, TextStart, std::string& buffer) -> std::string_view {
      return buffer = replacement(text);
    };
  }

  Step read_strip(const Fields& f) {
    f.known({"type", "strip_left", "strip_right"});
    const bool left = f.get<bool>("strip_left"), right = f.get<bool>("strip_right");
    moves_beginning_ = moves_beginning_ || left;
    return [left, right](std::string_view text, TextStart, std::string&) {
      if (left) text.remove_prefix(leading_space(text));
      if (right) text.remove_suffix(trailing_space(text));
      return text;
    };
  }

  std::vector<Step> steps_;
  bool moves_beginning_ = false;
  Growth growth_;
};

}  // namespace streambp
