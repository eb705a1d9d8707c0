// The field "pre_tokenizer" of a tokenizer.json: splits a normalized text into words, step by step.
#pragma once

#include <optional>

#include "text/tokenizer/components.h"
#include "text/tokenizer/normalizer.h"

namespace streambp {

class PreTokenizer {
 public:
  explicit PreTokenizer(const Fields& file, const Normalizer& normalizer) {
    for_each_component(file, "pre_tokenizer", "pretokenizers", [&](const std::string& type, const Fields& f) {
      require(!byte_level_, f.file, ": after ByteLevel no other pre_tokenizer is supported");
      // Each step that splits words and puts a character before each can double the text.
      require(steps_.size() < 16, f.file, ": more steps than are supported");
      read(type, f, normalizer);
    });
  }

  // True if the model reads the bytes of a word, not its characters.
  bool byte_level() const { return byte_level_; }

  // The position of a piece of the text.
  struct Place {
    bool first;       // at the start of the text
    TextStart start;  // how that text starts
  };

  // Calls f(word) for every word of the text.
  template <class F>
  void for_each_word(std::string_view text, Place place, F&& f) const {
    run(0, text, place, f);
  }

 private:
  enum class Prefix { never, first, always };
  enum class Delimiter { isolated, removed, merged_with_previous, merged_with_next, contiguous };
  struct Step {
    Prefix prefix = Prefix::never;  // prepend `space` to a text that does not start with it
    std::string space = " ";
    bool replaces_spaces = false;    // replaces spaces with `space`
    std::optional<Pattern> pattern;  // of the delimiters
    Span delimiters = Span::match;   // or the gaps between matches
    Delimiter delimiter = Delimiter::isolated;
  };
  struct Part {
    std::size_t begin, end;
  };
  static constexpr const char* kGpt2Words =
      R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

  void read(const std::string& type, const Fields& f, const Normalizer& normalizer) {
    Step step;
    if (type == "ByteLevel") {
      f.known({"type", "add_prefix_space", "trim_offsets", "use_regex"});  // trim_offsets does not change tokens
      byte_level_ = true;
      if (f.get<bool>("add_prefix_space")) step.prefix = Prefix::always;
      if (f.get<bool>("use_regex", true)) step.pattern = Pattern::expression(f.file, kGpt2Words);
    } else if (type == "Split") {
      f.known({"type", "pattern", "behavior", "invert"});
      step.pattern = read_pattern(f);
      if (f.get<bool>("invert", false)) step.delimiters = Span::gap;
      step.delimiter = delimiter(f);
    } else if (type == "Digits") {
      f.known({"type", "individual_digits"});
      // This component of the library uses the digits of Unicode 17.
      step.pattern = Pattern::expression(f.file, R"([\p{N}\x{11DE0}-\x{11DE9}\x{16FF4}-\x{16FF6}])");
      step.delimiter = f.get<bool>("individual_digits") ? Delimiter::isolated : Delimiter::contiguous;
    } else if (type == "Metaspace") {
      read_metaspace(f, step);
      require(step.prefix != Prefix::first || !normalizer.moves_beginning(), f.file,
              ": prepend_scheme \"first\" is not supported after a normalizer that can remove the first character");
    } else {
      fail(f.file, ": a pre_tokenizer of type ", quote(type),
           " is not supported; ByteLevel, Split, Digits, Metaspace and Sequence are");
    }
    steps_.push_back(std::move(step));
  }

  static void read_metaspace(const Fields& f, Step& step) {
    f.known({"type", "replacement", "prepend_scheme", "add_prefix_space", "split", "str_rep"});
    step.space = read_space(f);
    step.replaces_spaces = true;
    const auto scheme = f.get<std::string>("prepend_scheme", "always");
    require(scheme == "always" || scheme == "first" || scheme == "never", f.file, ": prepend_scheme ", quote(scheme),
            " is not supported; always, first and never are");
    step.prefix = scheme == "always" ? Prefix::always : scheme == "first" ? Prefix::first : Prefix::never;
    if (!f.get<bool>("add_prefix_space", true)) {  // in older files
      require(!f.has("prepend_scheme") || scheme == "never", f.file,
              ": add_prefix_space false contradicts prepend_scheme \"", scheme, "\"");
      step.prefix = Prefix::never;
    }
    if (f.get<bool>("split", true)) {
      step.pattern = Pattern::literal(step.space);
      step.delimiter = Delimiter::merged_with_next;
    }
  }

  static Delimiter delimiter(const Fields& f) {
    const auto name = f.get<std::string>("behavior");
    if (name == "Isolated") return Delimiter::isolated;
    if (name == "Removed") return Delimiter::removed;
    if (name == "MergedWithPrevious") return Delimiter::merged_with_previous;
    if (name == "MergedWithNext") return Delimiter::merged_with_next;
    if (name == "Contiguous") return Delimiter::contiguous;
    fail(f.file, ": behavior ", quote(name),
         " is not supported; Isolated, Removed, MergedWithPrevious, MergedWithNext and Contiguous are");
  }

  template <class F>
  void run(std::size_t index, std::string_view text, Place place, F& f) const {
    if (text.empty()) return;
    if (index == steps_.size()) return f(text);
    const Step& step = steps_[index];
    std::string buffer;
    if (step.replaces_spaces && text.find(' ') != std::string_view::npos) {
      static const Pattern space = Pattern::literal(" ");
      text = buffer = replaced(space, text, step.space);
    }
    const bool wanted = step.prefix == Prefix::always || (step.prefix == Prefix::first && place.first);
    const bool continues = place.first && place.start == TextStart::continuation;
    if (wanted && !continues && text.substr(0, step.space.size()) != step.space) {
      text = buffer = step.space + std::string(text);
    }
    if (!step.pattern) return run(index + 1, text, place, f);
    split(step, text, [&](std::size_t begin, std::size_t end) {
      run(index + 1, text.substr(begin, end - begin), {place.first && begin == 0, place.start}, f);
    });
  }

  template <class F>
  static void split(const Step& step, std::string_view text, F&& f) {
    if (step.delimiter == Delimiter::isolated || step.delimiter == Delimiter::removed) {
      step.pattern->for_each(text, [&](std::size_t begin, std::size_t end, Span span) {
        if (step.delimiter == Delimiter::isolated || span != step.delimiters) f(begin, end);
      });
      return;
    }
    // MergedWithPrevious merges a delimiter with the text before it, but not with another delimiter; MergedWithNext
    // with the text after it; Contiguous with other delimiters.
    std::vector<Part> parts;
    bool previous = false;  // whether the last part is a delimiter
    step.pattern->for_each(text, [&](std::size_t begin, std::size_t end, Span span) {
      const bool delimits = span == step.delimiters;
      const bool joins = step.delimiter == Delimiter::contiguous             ? delimits == previous
                         : step.delimiter == Delimiter::merged_with_previous ? delimits && !previous
                                                                             : !delimits && previous;
      previous = delimits;
      if (joins && !parts.empty()) {
        parts.back().end = end;
      } else {
        parts.push_back({begin, end});
      }
    });
    for (const Part& part : parts) f(part.begin, part.end);
  }

  std::vector<Step> steps_;
  bool byte_level_ = false;
};

}  // namespace streambp
