#include "commands/option_table.h"

#include <CLI/CLI.hpp>

#include "commands/help.h"
#include "commands/other_names.h"
#include "commands/page.h"
#include "commands/text.h"
#include "data/files/hash.h"
#include "data/files/results.h"
#include "text/utf8.h"

namespace streambp {

namespace {

std::optional<double> number(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  return value;
}

template <class Integer>
std::string whole(const std::string& text) {
  Integer value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size()) return "";
  const bool unsigned_only = std::is_unsigned_v<Integer>;
  return quote(text) + " is not a whole number from " + (unsigned_only ? "0" : "-2^63") + " to " +
         (unsigned_only ? "2^64 - 1" : "2^63 - 1");
}

std::string utf8(const std::string& text) {
  if (is_utf8(text)) return "";
  return quote(text) + " is not UTF-8; write the text in UTF-8, or rename the file";
}

// An unset variable of a script must not silently mean the default.
std::string not_empty(const std::string& text) { return text.empty() ? "the value is empty" : utf8(text); }

// The check of the type, which comes before the row's own check.
Check check_of_type(const Target& target) {
  return std::visit(
      [](auto* value) -> Check {
        using V = std::decay_t<decltype(*value)>;
        if constexpr (std::is_same_v<V, Index> || std::is_same_v<V, std::vector<Index>>) return whole<Index>;
        if constexpr (std::is_same_v<V, std::uint64_t>) return whole<std::uint64_t>;
        if constexpr (std::is_same_v<V, double>) {
          return [](const std::string& text) { return number(text) ? "" : quote(text) + " is not a number"; };
        }
        if constexpr (std::is_same_v<V, std::string>) return not_empty;
        if constexpr (std::is_same_v<V, std::vector<std::string>>) return utf8;
        return {};
      },
      target);
}

Json to_json(const Target& target) {
  return std::visit([](auto* value) { return Json(*value); }, target);
}

// An empty text has no hash.
std::string hash_or_empty(const std::string& text) { return text.empty() ? "" : hash_of(text); }

std::string text_of(const Json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }

// Underscores and dashes are alike: "--a-b" becomes "--a-b,--a_b".
std::string with_underscores(const std::string& names) {
  std::string all = names;
  std::istringstream each(names);
  for (std::string name; std::getline(each, name, ',');) {
    if (name.find('-', 2) == std::string::npos) continue;
    std::replace(name.begin() + 2, name.end(), '-', '_');
    all += "," + name;
  }
  return all;
}

// What is wrong with a value from a checkpoint.
std::string wrong(const std::vector<Check>& checks, const Json& value) {
  for (const Json& one : value.is_array() ? value : Json::array({value}))
    for (const Check& check : checks)
      if (const std::string error = one.is_boolean() ? "" : check(text_of(one)); !error.empty()) return error;
  return "";
}

}  // namespace

namespace checks {

Check one_of(std::vector<std::string> choices) {
  return [=](const std::string& text) {
    const bool known = std::find(choices.begin(), choices.end(), text) != choices.end();
    return known ? "" : quote(text) + " is not one of " + join(choices);
  };
}

Check between(double least, double most) {
  return [=](const std::string& text) {
    const auto value = number(text);
    return value && least <= *value && *value <= most ? ""
                                                      : format("%s is not between %.12g and %.12g", text, least, most);
  };
}

Check positive() {
  return [](const std::string& text) {
    const auto value = number(text);
    return value && std::isfinite(*value) && *value > 0 ? "" : text + " is not a finite number greater than 0";
  };
}

Check not_negative() {
  return [](const std::string& text) {
    const auto value = number(text);
    return value && std::isfinite(*value) && *value >= 0 ? "" : text + " is not a finite number of at least 0";
  };
}

namespace {

// The error is the message that f(text) throws.
Check accepted_by(std::function<void(const std::string&)> f) {
  return [=](const std::string& text) -> std::string {
    try {
      f(text);
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  };
}

}  // namespace

Check memory() { return accepted_by(parse_bytes); }
Check page() { return accepted_by(require_replaceable_page); }
Check results_file() { return accepted_by(require_replaceable); }

}  // namespace checks

OptionTable::OptionTable(CLI::App& program, const std::string& command, const std::string& description,
                         std::function<void()> run)
    : app_(program.add_subcommand(command, description)) {
  app_->callback(std::move(run));
  app_->formatter_fn([this](const CLI::App*, const std::string&, CLI::AppFormatMode mode) {
    return help(mode == CLI::AppFormatMode::All || first_page_.empty() ? Pages::all : Pages::first);
  });
}

void OptionTable::add_with_optional_value(const std::string& flag, const Target& value, const std::string& help,
                                          const Check& check) {
  add(flag, value, help, check);
  app_->get_option(flag)->expected(0, 1);
}

void OptionTable::add(const std::string& flag, const Target& target, const std::string& help, const Check& check,
                      const std::string& shown) {
  std::string names = flag;
  for (const OtherName& other : other_names(app_->get_name(), flag)) {
    if (other.value) {  // it must come before the option that gets its value
      app_->add_flag_callback(with_underscores(other.name),
                              [=, app = app_] { app->get_option(flag)->add_result(other.value); });
    } else {
      names += "," + std::string(other.name);
    }
  }
  CLI::Option* option = std::visit(
      [&](auto* value) {
        using V = std::decay_t<decltype(*value)>;
        if constexpr (std::is_same_v<V, bool>) {
          return app_->add_flag(with_underscores(names), *value, "");
        } else {
          return app_->add_option(with_underscores(names), *value, "");
        }
      },
      target);
  const Json initial = to_json(target);
  const bool is_flag = std::holds_alternative<bool*>(target);
  if (!is_flag && !(initial.is_array() && initial.empty())) option->capture_default_str();
  if (!shown.empty()) option->default_str(shown == "none" ? "" : shown);
  std::vector<Check> checks;
  if (!is_flag) checks.push_back(check_of_type(target));
  if (check) checks.push_back(check);
  for (const Check& one : checks) option->check(CLI::Validator([=](std::string& text) { return one(text); }, ""));
  entries_.push_back({flag, target, help, checks, initial, section_});
}

void OptionTable::can_resume(const Resumed& options) {
  for (Entry& e : entries_) e.on_resume = OnResume::fixed;
  for (const auto& [flags, what] : {std::pair(options.kept, OnResume::kept),
                                    {options.hashed, OnResume::hashed},
                                    {options.forgotten, OnResume::forgotten}})
    for (const std::string& flag : flags) std::ranges::find(entries_, flag, &Entry::flag)->on_resume = what;
}

void OptionTable::require(const std::string& flag) { app_->get_option(flag)->required(); }

std::string OptionTable::help(Pages pages) const {
  std::string positional, sections, section;
  for (const Entry& e : entries_)
    if (e.flag[0] != '-') positional += " " + e.flag;
  if (pages == Pages::all) {
    for (const Entry& e : entries_) {
      if (e.section != section) sections += "\n" + (section = e.section) + ":\n";
      sections += help(e, pages);
    }
  } else {
    sections = "\nOptions:\n";
    for (const std::string& flag : first_page_)
      sections += help(*std::ranges::find(entries_, flag, &Entry::flag), pages);
    sections += help_entry("--help-all", "All " + std::to_string(entries_.size()) + " options: streambp " +
                                             app_->get_name() + " --help-all");
  }
  return filled(app_->get_description()) + "\nUsage: streambp " + app_->get_name() + positional + " [OPTIONS]\n" +
         sections;
}

std::string OptionTable::help(const Entry& e, Pages pages) const {
  const CLI::Option& option = *app_->get_option(e.flag);
  std::string name = e.flag, text = e.help;
  if (option.get_type_size() > 0) name += " " + option.get_type_name();
  if (option.get_expected_max() > 1) name += " ...";
  if (option.get_required()) text += " (required)";
  if (!option.get_default_str().empty()) text += " (default: " + option.get_default_str() + ")";
  std::string also;
  for (const OtherName& other : other_names(app_->get_name(), e.flag))
    also += (also.empty() ? "; also " : ", ") + std::string(other.name) +
            (other.value ? " for " + std::string(other.value) : "");
  return help_entry(name, pages == Pages::all ? text + also : text);
}

// An option that the command does not have is not given.
bool OptionTable::given(const std::string& flag) const {
  const CLI::Option* option = app_->get_option_no_throw(flag);
  return option && option->count() > 0;
}
bool OptionTable::any_given(const std::vector<std::string>& flags) const {
  return std::any_of(flags.begin(), flags.end(), [&](const std::string& flag) { return given(flag); });
}

void OptionTable::only(const std::vector<std::string>& flags, bool applies, const std::string& why) const {
  for (const std::string& flag : flags) streambp::require(applies || !given(flag), flag, why);
}

void OptionTable::require_alone(const std::string& flag) const {
  for (const Entry& e : entries_)
    streambp::require(e.flag == flag || !given(e.flag), flag, " takes no other options; leave out ", e.flag);
}

Json OptionTable::lasting() const {
  Json options = Json::object();
  for (const Entry& e : entries_) {
    if (e.on_resume == OnResume::hashed)
      options[e.flag] = hash_or_empty(*std::get<std::string*>(e.value));
    else if (e.on_resume != OnResume::forgotten)
      options[e.flag] = to_json(e.value);
  }
  return options;
}

std::set<std::string> OptionTable::secrets() const {
  std::set<std::string> flags;
  for (const Entry& e : entries_)
    if (e.on_resume == OnResume::hashed) flags.insert(e.flag);
  return flags;
}

void OptionTable::check_hashed(const Entry& entry, const std::string& stored, const std::string& run) const {
  const std::string here = *std::get<std::string*>(entry.value);
  const std::string started = ": the run in " + run + " was started with";
  streambp::require(stored.empty() || given(entry.flag), entry.flag, started,
                    " this option, which is not stored; give the same value again");
  streambp::require(!stored.empty() || here.empty(), entry.flag, started, "out this option; leave it out");
  streambp::require(stored == hash_or_empty(here), entry.flag, started, " another ", entry.flag,
                    "; give the same value again, or start a new run");
}

void OptionTable::restore(const Json& options, const std::string& file, const std::string& run) {
  streambp::require(options.is_object(), file, ": \"options\" is not an object; is the file complete?");
  const bool one_of_these_given = any_given(together_);
  for (const Entry& e : entries_) {
    if (e.on_resume == OnResume::forgotten) continue;
    const bool is_together = std::find(together_.begin(), together_.end(), e.flag) != together_.end();
    if (e.on_resume == OnResume::kept && (given(e.flag) || !options.contains(e.flag))) continue;
    if (is_together && one_of_these_given) continue;
    streambp::require(options.contains(e.flag), file, ": the option ", e.flag, " is missing");
    const Json& stored = options[e.flag];
    const Json here = to_json(e.value);
    const bool alike =
        (stored.is_number() && here.is_number() && (stored.is_number_integer() || !here.is_number_integer())) ||
        stored.type() == here.type();
    streambp::require(alike, file, ": the option ", e.flag, " has a value of the wrong type");
    if (e.on_resume == OnResume::hashed) {
      check_hashed(e, stored.get<std::string>(), run);
      continue;
    }
    // A default may be a special value that the command line does not accept, such as an empty string.
    const std::string error = stored == e.initial ? "" : wrong(e.checks, stored);
    streambp::require(error.empty(), file, ": the option ", e.flag, ": ", error, "; is the file damaged?");
    // "auto" agrees with the value that it was resolved to.
    streambp::require(!given(e.flag) || here == stored || here == "auto", e.flag, " ", here.dump(), ": the run in ",
                      run, " was started with ", stored.dump(), "; leave the option out, or start a new run");
    try {
      std::visit([&](auto* value) { stored.get_to(*value); }, e.value);
    } catch (const Json::exception&) {
      fail(file, ": the option ", e.flag, " has a value of the wrong type");
    }
  }
}

}  // namespace streambp
