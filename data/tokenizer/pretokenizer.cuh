// What happens to a text before its words become tokens, as the fields "normalizer" and "pre_tokenizer" of a
// tokenizer.json say: first it is changed, then it is taken apart into words, step by step.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/files/fields.cuh"
#include "data/tokenizer/pattern.cuh"

namespace streambp {

// A list of steps: one for a component, several for a "Sequence" of components, none for null. `read` adds what one
// component is.
template <class Read>
void for_each_component(const Fields& parent, const char* name, const char* parts, Read&& read) {
  if (!parent.has(name)) return;
  const Fields f = parent.object(name);
  const auto type = f.get<std::string>("type");
  if (type != "Sequence") return read(type, f);
  f.known({"type", parts});
  require(f.has(parts) && f.json.at(parts).is_array(), f.file, ": the field \"", parts, "\" is not a list");
  for (std::size_t i = 0; i < f.json.at(parts).size(); ++i) {
    const Json holder = {{"part", f.json.at(parts)[i]}};
    const Fields in_list(holder, f.file + ", number " + std::to_string(i + 1));
    require(in_list.has("part"), in_list.file, ": is null");
    for_each_component(in_list, "part", parts, read);
  }
}

// {"String": "text"} or {"Regex": "expression"}
inline Pattern read_pattern(const Fields& f) {
  const Fields pattern = f.object("pattern");
  pattern.known({"String", "Regex"});
  require(pattern.json.size() == 1, pattern.file, ": expected \"String\" or \"Regex\"");
  if (pattern.has("Regex")) return Pattern::expression(f.file, pattern.get<std::string>("Regex"));
  const auto text = pattern.get<std::string>("String");
  require(!text.empty(), pattern.file, ": an empty text is not supported");
  return Pattern::literal(text);
}

inline std::string replaced(const Pattern& pattern, std::string_view text, const std::string& content) {
  std::string out;
  pattern.for_each(text, [&](std::size_t begin, std::size_t end, bool match) {
    out += match ? content : text.substr(begin, end - begin);
  });
  return out;
}

// {"type": "Replace", "pattern": ..., "content": "text"}
struct Replacement {
  Pattern pattern;
  std::string content;

  // `growth` is how many times as long the replacements so far may make a text: a few that feed each other could make a
  // word fill the memory.
  Replacement(const Fields& f, double& growth)
      : pattern(read_pattern(f)), content((f.known({"type", "pattern", "content"}), f.get<std::string>("content"))) {
    growth *= std::max(1.0, static_cast<double>(content.size()) / static_cast<double>(pattern.shortest()));
    require(growth <= 4096, f.file, ": this replacement, with those before it, may make a text ", growth,
            " times as long, which is more than is supported");
  }
  std::string operator()(std::string_view text) const { return replaced(pattern, text, content); }
};

// The one character that stands for a space.
inline std::string read_space(const Fields& f) {
  const auto space = f.get<std::string>("replacement");
  require(!space.empty() && first_character(space).bytes == space.size(), f.file, ": replacement \"", space,
          "\" is not one character");
  return space;
}

class Normalizer {
 public:
  explicit Normalizer(const Fields& file) {
    for_each_component(file, "normalizer", "normalizers",
                       [&](const std::string& type, const Fields& f) { steps_.push_back(read(type, f)); });
  }

  // True if the first character may vanish.
  bool moves_beginning() const { return moves_beginning_; }

  // The changed text, which is `text` itself or in `buffer`. Nothing is put before one that `continues`.
  std::string_view apply(std::string_view text, bool continues, std::string& buffer) const {
    for (const Step& step : steps_) {
      if (!text.empty()) text = step(text, continues, buffer);
    }
    return text;
  }

 private:
  // A step returns its argument, or a view of the buffer, in which its argument may lie.
  using Step = std::function<std::string_view(std::string_view, bool, std::string&)>;

  Step read(const std::string& type, const Fields& f) {
    if (type == "NFC" || type == "NFD") {
      f.known({"type"});
      return
          [form = type == "NFC" ? NormalForm::nfc : NormalForm::nfd](std::string_view text, bool, std::string& buffer) {
            return surely_normal(form, text) ? text : buffer = normalised(form, text);
          };
    }
    if (type == "Prepend") {
      f.known({"type", "prepend"});
      return [prefix = f.get<std::string>("prepend")](std::string_view text, bool continues, std::string& buffer) {
        return continues ? text : buffer = prefix + std::string(text);
      };
    }
    if (type == "Replace") {
      const Replacement replacement(f, growth_);
      moves_beginning_ = moves_beginning_ || !replacement.pattern.one_character() || replacement.content.empty();
      return [replacement](std::string_view text, bool, std::string& buffer) -> std::string_view {
        return buffer = replacement(text);
      };
    }
    if (type == "Strip") {
      f.known({"type", "strip_left", "strip_right"});
      const bool left = f.get<bool>("strip_left"), right = f.get<bool>("strip_right");
      moves_beginning_ = moves_beginning_ || left;
      return [left, right](std::string_view text, bool, std::string&) {
        if (left) text.remove_prefix(leading_space(text));
        if (right) text.remove_suffix(trailing_space(text));
        return text;
      };
    }
    fail(f.file, ": a normalizer of type \"", type,
         "\" is not supported; NFC, NFD, Prepend, Replace, Strip and Sequence are");
  }

  std::vector<Step> steps_;
  bool moves_beginning_ = false;
  double growth_ = 1;
};

class PreTokenizer {
 public:
  explicit PreTokenizer(const Fields& file, const Normalizer& normalizer) {
    for_each_component(file, "pre_tokenizer", "pretokenizers", [&](const std::string& type, const Fields& f) {
      require(!byte_level_, f.file, ": after ByteLevel no other pre_tokenizer is supported");
      // Two that split words and put something before each can double a text.
      require(steps_.size() < 16, f.file, ": more steps than are supported");
      read(type, f, normalizer);
    });
  }

  // True if words are to be taken as bytes.
  bool byte_level() const { return byte_level_; }

  // Where a text stands: at the beginning of the whole, and if so, whether that goes on from elsewhere.
  struct Place {
    bool first, continues;
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
    Prefix prefix = Prefix::never;  // put `space` before a text that does not begin with it
    std::string space = " ";
    bool replaces_spaces = false;  // by `space`
    std::vector<Pattern> pattern;  // one to split at, or none
    bool inverted = false;         // split at what lies between the matches
    Delimiter delimiter = Delimiter::isolated;
  };
  struct Part {
    std::size_t begin, end;
  };

  void read(const std::string& type, const Fields& f, const Normalizer& normalizer) {
    Step step;
    if (type == "ByteLevel") {
      f.known({"type", "add_prefix_space", "trim_offsets", "use_regex"});  // offsets are of no interest here
      byte_level_ = true;
      if (f.get<bool>("add_prefix_space")) step.prefix = Prefix::always;
      if (f.get<bool>("use_regex", true)) {
        step.pattern = {Pattern::expression(
            f.file, R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)")};
      }
    } else if (type == "Split") {
      f.known({"type", "pattern", "behavior", "invert"});
      step.pattern = {read_pattern(f)};
      step.inverted = f.get<bool>("invert", false);
      step.delimiter = delimiter(f);
    } else if (type == "Digits") {
      f.known({"type", "individual_digits"});
      // with the numbers of Unicode 17, which only this component of the library knows
      step.pattern = {Pattern::expression(f.file, R"([\p{N}\x{11DE0}-\x{11DE9}\x{16FF4}-\x{16FF6}])")};
      step.delimiter = f.get<bool>("individual_digits") ? Delimiter::isolated : Delimiter::contiguous;
    } else if (type == "Metaspace") {
      read_metaspace(f, step);
      require(step.prefix != Prefix::first || !normalizer.moves_beginning(), f.file,
              ": prepend_scheme \"first\" is not supported after a normalizer that may change where the text begins");
    } else {
      fail(f.file, ": a pre_tokenizer of type \"", type,
           "\" is not supported; ByteLevel, Split, Digits, Metaspace and Sequence are");
    }
    require(steps_.size() < 64, f.file, ": more steps than are supported");
    steps_.push_back(std::move(step));
  }

  static void read_metaspace(const Fields& f, Step& step) {
    f.known({"type", "replacement", "prepend_scheme", "add_prefix_space", "split", "str_rep"});
    step.space = read_space(f);
    step.replaces_spaces = true;
    const auto scheme = f.get<std::string>("prepend_scheme", "always");
    require(scheme == "always" || scheme == "first" || scheme == "never", f.file, ": prepend_scheme \"", scheme,
            "\" is not supported; always, first and never are");
    step.prefix = scheme == "always" ? Prefix::always : scheme == "first" ? Prefix::first : Prefix::never;
    if (!f.get<bool>("add_prefix_space", true)) {  // the older way to say it
      require(!f.has("prepend_scheme") || scheme == "never", f.file,
              ": add_prefix_space false contradicts prepend_scheme \"", scheme, "\"");
      step.prefix = Prefix::never;
    }
    if (f.get<bool>("split", true)) {
      step.pattern = {Pattern::literal(step.space)};
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
    fail(f.file, ": behavior \"", name,
         "\" is not supported; Isolated, Removed, MergedWithPrevious, MergedWithNext and Contiguous are");
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
    if (wanted && !(place.first && place.continues) && text.substr(0, step.space.size()) != step.space) {
      text = buffer = step.space + std::string(text);
    }
    if (step.pattern.empty()) return run(index + 1, text, place, f);
    split(step, text, [&](std::size_t begin, std::size_t end) {
      run(index + 1, text.substr(begin, end - begin), {place.first && begin == 0, place.continues}, f);
    });
  }

  template <class F>
  static void split(const Step& step, std::string_view text, F&& f) {
    const Pattern& pattern = step.pattern.front();
    if (step.delimiter == Delimiter::isolated || step.delimiter == Delimiter::removed) {
      pattern.for_each(text, [&](std::size_t begin, std::size_t end, bool match) {
        if (step.delimiter == Delimiter::isolated || match == step.inverted) f(begin, end);
      });
      return;
    }
    // A delimiter joins the text before it, but not another delimiter; or the text after it; or other delimiters.
    std::vector<Part> parts;
    bool previous = false;  // was the last part a delimiter?
    pattern.for_each(text, [&](std::size_t begin, std::size_t end, bool match) {
      const bool delimits = match != step.inverted;
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
