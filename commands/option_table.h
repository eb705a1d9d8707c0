// The options of a command as a table: one row declares an option's flag, default, help and check, and whether `train
// --resume` restores it. (CLI11 does the parsing. Only option_table.cpp and program.cpp include it, because it
// is slow to compile.)
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <variant>
#include <vector>

#include "kernels/base/matrix.cuh"
#include "text/json.h"

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
Check results_file();  // a new file, or old results of this program
Check page();          // the same of pages
}  // namespace checks

// What --resume does with an option. What it is in checkpoints that are older than the option says TrainOptions::restore.
enum class OnResume {
  forgotten,  // applies to this invocation only
  kept,       // restored, unless the command line changes it
  fixed,      // restored; the command line cannot change it, because it affects the bits of the result
  hashed,     // fixed, but stored as a hash, so it must be given again: for commands, which may contain a key
};

// Where an option's value is stored. Its initial value is the default.
using Target =
    std::variant<bool*, Index*, double*, std::uint64_t*, std::string*, std::vector<std::string>*, std::vector<Index>*>;

class OptionTable {
 public:
  // Adds a command to the program. run() is called once its options are parsed.
  OptionTable(CLI::App& program, const std::string& command, const std::string& description, std::function<void()> run);

  // Rows added from now on appear under this heading in --help.
  void section(const std::string& heading) { section_ = heading; }
  // A flag begins with "--"; a name without it is a positional argument. shown: the default that --help shows, if it is not
  // the value; "none": nothing.
  void add(const std::string& flag, const Target& value, const std::string& help, const Check& check = {},
           const std::string& shown = "");
  // The same, but the value of the option may be omitted.
  void add_with_optional_value(const std::string& flag, const Target& value, const std::string& help,
                               const Check& check = {});
  void require(const std::string& flag);
  // What --help shows, in this order; --help-all shows every option. Without it both show all.
  void first_page(std::vector<std::string> flags) { first_page_ = std::move(flags); }
  // These options form one setting: if one of them is given, --resume restores none of them.
  void keep_together(std::vector<std::string> flags) { together_ = std::move(flags); }

  // A run of this command can be resumed; options that are in none of these lists are fixed.
  struct Resumed {
    std::vector<std::string> kept, hashed, forgotten;
  };
  void can_resume(const Resumed& options);

  // Refuses these options unless `applies`: "FLAG WHY".
  void only(const std::vector<std::string>& flags, bool applies, const std::string& why) const;

  bool given(const std::string& flag) const;
  void require_alone(const std::string& flag) const;
  bool any_given(const std::vector<std::string>& flags) const;

  // The values of the options that last, for a checkpoint.
  Json lasting() const;
  // The options of which it has only a hash.
  std::set<std::string> secrets() const;
  // Restores them from a checkpoint. Messages name `file` and `run`.
  void restore(const Json& options, const std::string& file, const std::string& run);

 private:
  struct Entry {
    std::string flag;
    Target value;
    std::string help;
    std::vector<Check> checks;
    Json initial;  // the default
    std::string section;
    OnResume on_resume = OnResume::forgotten;
  };
  enum class Pages { first, all };
  std::string help(Pages pages) const;
  std::string help(const Entry& entry, Pages pages) const;
  void check_hashed(const Entry& entry, const std::string& stored, const std::string& run) const;

  CLI::App* app_;
  std::string section_ = "Options";
  std::vector<Entry> entries_;
  std::vector<std::string> together_, first_page_;
};

}  // namespace streambp
