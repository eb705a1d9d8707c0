// The text of --help, in the width of the terminal; words are never broken.
#pragma once

#include <string>
#include <vector>

namespace streambp {

// Lines that begin with a space stay as they are; the others are filled, paragraph by paragraph.
std::string filled(const std::string& text);

// A name, and what it means beside it.
std::string help_entry(const std::string& name, const std::string& meaning);

// " did you mean A or B?", of the choices nearest to a misspelt word, or nothing.
std::string did_you_mean(const std::string& word, const std::vector<std::string>& choices);

}  // namespace streambp
