// Shared by the components of a tokenizer.json: sequences of components, patterns, replacements.
#pragma once

#include "text/fields.h"
#include "text/tokenizer/pattern.h"

namespace streambp {

// Calls read(type, fields) for a component, or for each part if it is a "Sequence".
template <class Read>
void read_component(const Fields& f, const char* parts, Read&& read) {
  const auto type = f.get<std::string>("type");
  if (type != "Sequence") return read(type, f);
  f.known({"type", parts});
  std::size_t number = 0;
  for (const Json& part : f.list(parts))
    read_component(Fields(part, f.file + ", number " + std::to_string(++number)), parts, read);
}

// The same for the component in the field `name`, which may be missing. Each part takes time for every text.
template <class Read>
void for_each_component(const Fields& parent, const char* name, const char* parts, Read&& read) {
  if (!parent.has(name)) return;
  std::size_t count = 0;
  read_component(parent.object(name), parts, [&](const std::string& type, const Fields& f) {
    require(++count <= 64, f.file, ": more steps than are supported");
    read(type, f);
  });
}

// {"String": "text"} or {"Regex": "expression"}
inline Pattern read_pattern(const Fields& f) {
  const Fields pattern = f.object("pattern");
  pattern.known({"String", "Regex"});
  require(pattern.json.size() == 1, pattern.file, ": expected \"String\" or \"Regex\"");
  if (pattern.has("Regex")) return Pattern::expression(f.file, pattern.get<std::string>("Regex"));
  const auto text = pattern.get<std::string>("String");
  require(!text.empty(), pattern.file, ": an empty string is not supported");
  return Pattern::literal(text);
}

// The character that represents a space.
inline std::string read_space(const Fields& f) {
  const auto space = f.get<std::string>("replacement");
  require(!space.empty() && first_character(space).bytes == space.size(), f.file, ": replacement ", quote(space),
          " is not one character");
  return space;
}

inline std::string replaced(const Pattern& pattern, std::string_view text, const std::string& content) {
  std::string out;
  pattern.for_each(text, [&](std::size_t begin, std::size_t end, Span span) {
    out += span == Span::match ? content : text.substr(begin, end - begin);
  });
  return out;
}

// Limits the factor by which all steps together can lengthen a text. A few replacements that feed each other could
// otherwise fill the memory.
class Growth {
 public:
  void multiply(double factor, const Fields& f) {
    factor_ *= std::max(1.0, factor);
    require(factor_ <= 4096, f.file, ": this step and those before it can make a text ", factor_,
            " times as long; more than 4096 is not supported");
  }

 private:
  double factor_ = 1;
};

// {"type": "Replace", "pattern": ..., "content": "text"}
struct Replacement {
  Pattern pattern;
  std::string content;

  Replacement(const Fields& f, Growth& growth) : pattern(read_pattern(f)), content(f.get<std::string>("content")) {
    f.known({"type", "pattern", "content"});
    growth.multiply(static_cast<double>(content.size()) / static_cast<double>(pattern.shortest()), f);
  }
  std::string operator()(std::string_view text) const { return replaced(pattern, text, content); }
};

}  // namespace streambp
