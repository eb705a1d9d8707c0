// The options of a command as a table: one row declares an option's flag, default, help and check, and whether
// `train --resume` brings it back. (CLI11 does the parsing, in option_table.cpp alone: it is slow to compile.)
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "data/files/json.cuh"
#include "kernels/base/matrix.cuh"

namespace CLI {
class App;
}

namespace streambp {

// Says what is wrong with a value; empty: nothing.
using Check = std::function<std::string(const std::string& value)>;

namespace checks {
Check one_of(std::vector<std::string> choices);
Check between(double least, double most);
Check positive();      // finite and above zero
Check not_negative();  // finite
Check memory();        // an amount such as 512MiB
Check writable_file();
}  // namespace checks

// What --resume does with an option.
enum class Lasts {
  no,     // belongs to one start of the program
  kept,   // continues as it was, unless the command line changes it
  fixed,  // decides the bits of the result; the command line cannot change it
};

// Where an option's value goes. What is there beforehand is the default.
using Target =
    std::variant<bool*, Index*, double*, std::uint64_t*, std::string*, std::vector<std::string>*, std::vector<Index>*>;

struct Row {
  Target value;
  std::string help;
  Check check = {};
  Lasts lasts = Lasts::no;
  std::string shown_default = {};  // by --help, where it is not the value's own
};

class OptionTable {
 public:
  // Adds a command to the program. run() is called once its options are parsed.
  OptionTable(CLI::App& program, const std::string& command, const std::string& description, std::function<void()> run);

  // Rows added from now on stand under this heading in --help.
  void section(const std::string& heading) { section_ = heading; }
  // A flag begins with "--"; without, the argument stands alone.
  void add(const std::string& flag, Row row);
  // An option whose value may be left out.
  void add_with_optional_value(const std::string& flag, Row row);
  void require(const std::string& flag);
  // Refuses to take both.
  void exclude(const std::string& flag, const std::string& other);
  // Some of them are one setting: if one is given, --resume brings none of them back.
  void keep_together(std::vector<std::string> flags) { together_ = std::move(flags); }

  bool given(const std::string& flag) const;
  bool any_given(const std::vector<std::string>& flags) const;

  // The options that last, for a checkpoint.
  Json lasting() const;
  // Takes them from a checkpoint. `file` and `run` name it in messages.
  void restore(const Json& options, const std::string& file, const std::string& run);

 private:
  struct Entry {
    std::string flag;
    Row row;
    Json initial;  // the default
  };

  void add(const std::string& flag, Row row, bool value_is_optional);

  CLI::App* app_;
  std::string section_;
  std::vector<Entry> entries_;
  std::vector<std::string> together_;
};

}  // namespace streambp
