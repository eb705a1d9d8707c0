// The program of a template, and the functions that it can call.
#include "text/template/template.h"

#include <ctime>

#include "text/template/parser.h"

namespace streambp::jinja {

namespace {

std::tm parse_date(const std::string& date) {
  std::tm day = {};
  const char* end = strptime(date.c_str(), "%Y-%m-%d", &day);
  const int wanted = day.tm_mday;
  expect(end && *end == 0 && timegm(&day) != -1 && day.tm_mday == wanted, "the date ", quote(date),
         " is not YYYY-MM-DD, or no day");
  return day;
}

Value range(const Arguments& a) {
  const std::size_t count = a.positional.size();
  expect(count >= 1 && count <= 3, "range needs one to three numbers");
  const std::int64_t first = count > 1 ? integer_at(a, 0, "start", 0) : 0, last = integer_at(a, count > 1, "stop", 0),
                     step = count > 2 ? integer_at(a, 2, "step", 1) : 1;
  expect(step != 0, "range: a step of 0");
  std::vector<Value> numbers;
  for (std::int64_t i = first; step > 0 ? i < last : i > last; i += step) {
    expect(numbers.size() < 100'000, "range: more than 100000 numbers");
    numbers.emplace_back(i);
    if (step > 0 ? i > INT64_MAX - step : i < INT64_MIN - step) break;
  }
  const std::string by = step == 1 ? "" : ", " + std::to_string(step);
  return List{std::move(numbers), ListKind::range, 1,
              to_text("range(" + std::to_string(first) + ", " + std::to_string(last) + by + ")")};
}

// A function of every template
Value global(Run& run, std::string_view name, const std::tm& date) {
  if (name == "range") return function(range);
  if (name == "dict") {
    return function([](const Arguments& a) {
      const Value start = a.at(0, "mapping");
      std::vector<std::pair<Value, Value>> members;
      if (start.dict()) members = start.dict()->members;
      for (const auto& [key, value] : a.named) members.emplace_back(key, value);
      return dict_of(std::move(members));
    });
  }
  if (name == "namespace") {
    return function([&run](const Arguments& a) -> Value {
      Namespace* space = run.new_namespace();
      if (!a.positional.empty() && a.positional[0].dict())
        for (const auto& [key, value] : a.positional[0].dict()->members) space->set(str(key), value);
      for (const auto& [key, value] : a.named) space->set(key, value);
      return space;
    });
  }
  if (name == "raise_exception")
    return function([](const Arguments& a) -> Value { refuse(to_utf8(str(a.at(0, "message")))); });
  return function([&date](const Arguments& a) -> Value {
    char text[512];
    const Text given = text_at(a, 0, "format");
    const std::string form = to_utf8(given);
    expect(form.size() < 100, "strftime_now: a long format");
    const bool data = std::ranges::any_of(given, [](char32_t c) { return (c & kData) != 0; });
    return to_text({text, std::strftime(text, sizeof text, form.c_str(), &date)}, data ? kData : 0);
  });
}

// Characters and values, for the work that the data is worth
std::size_t size_of(const Value& v) {
  std::size_t size = 8 + v.size();
  if (v.list())
    for (const Value& item : v.list()->items) size += size_of(item);
  if (v.dict())
    for (const auto& [key, value] : v.dict()->members) size += size_of(key) + size_of(value);
  return size;
}
constexpr std::size_t kMostWork = 4'000'000'000;  // that the data can add

}  // namespace

struct Template::Program {
  std::tm date;
  Names names = {};
  Body body = {};
};

Template::Template(std::string_view source, const std::string& date) {
  expect(source.size() <= kLongestTemplate, "the template has more than ", kLongestTemplate, " bytes");
  expect(is_utf8(source), "the template is not UTF-8");
  const auto program = std::make_shared<Program>(Program{parse_date(date)});
  program->body = Parser::parse(source, program->names);
  program_ = program;
}

bool Template::marks_answers() const { return program_->names.find(to_text(kGenerationMark)).has_value(); }
bool Template::reads(const std::string& name) const { return program_->names.find(to_text(name)).has_value(); }

Text Template::render(const Variables& variables, std::size_t work) const {
  std::size_t size = 0;
  for (const auto& [name, value] : variables) size += size_of(value);
  Run run(work + std::min(100 * size, kMostWork));
  const auto set = [&](std::string_view name, auto&& value) {
    if (const auto number = program_->names.find(to_text(name))) run.set(*number, value());
  };
  for (const char* name : {"range", "dict", "namespace", "raise_exception", "strftime_now"})
    set(name, [&] { return global(run, name, program_->date); });
  for (const auto& [name, value] : variables) set(name, [&] { return value; });
  return run.printed([&] { execute(program_->body, run); });
}

}  // namespace streambp::jinja
