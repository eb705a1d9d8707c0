// The language of chat templates, against jinja2 as transformers sets it up (scripts/make_chat_golden.py).
#include "tests/golden.h"
#include "tests/temporary.h"
#include "text/json.h"
#include "text/template/template.h"

namespace streambp::jinja {
namespace {

const OrderedJson& golden_language() {
  static const auto json = parse_json<OrderedJson>(read_file(golden_folder() / "language.json"));
  return json;
}

Text rendered(const std::string& source, const OrderedJson& variables, char32_t marks = kData) {
  Variables all;
  for (const auto& [name, value] : variables.items()) all.emplace_back(name, from_json(value, marks));
  return Template(source, "2026-11-25").render(all);
}
std::string rendered(const std::string& source) { return to_utf8(rendered(source, golden_language()["variables"])); }

TEST(Language, GivesTheResultsOfJinja) {
  std::size_t errors = 0;
  for (const auto& [source, expected] : golden_language()["results"].items()) {
    if (expected.is_null()) {
      EXPECT_THROW(rendered(source), TemplateError) << source;
      ++errors;
    } else {
      std::string result;
      EXPECT_NO_THROW(result = rendered(source)) << source;
      EXPECT_EQ(result, expected.get<std::string>()) << source;
    }
  }
  EXPECT_GT(errors, 30u);
  EXPECT_GT(golden_language()["results"].size(), 350u);
}

// The data's characters in brackets, the template's outside.
std::string with_origins(const Text& text) {
  std::string out;
  bool inside = false;
  for (const char32_t c : text) {
    if (((c & kData) != 0) != inside) out += (inside = !inside) ? "[" : "]";
    append_utf8(out, TextView(&c, 1));
  }
  return out + (inside ? "]" : "");
}

TEST(Language, TellsDataFromMarkup) {
  const OrderedJson variables = {{"s", " ab "}, {"words", {"x", "y"}}, {"d", {{"key", "v\n"}}}};
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"<{{ s }}>", "<[ ab ]>"},
      {"{{ s | trim + '!' }}", "[ab]!"},
      {"{{ s.strip()[1:] ~ s[0] }}", "[b ]"},
      {"{{ s.replace('a', 'x') }}", "[ ]x[b ]"},
      {"{{ 'template'.replace('e', s.strip()) }}", "t[ab]mplat[ab]"},
      {"{{ words | join(', ') }}", "[x], [y]"},
      {"{{ ', '.join(words) | upper }}", "[X], [Y]"},
      {"{{ '%s=%s' % ('k', s) }}{{ '{}'.format(s) }}", "k=[ ab  ab ]"},
      {"{{ d | tojson }}", "{\"[key]\": \"[v]\\[n]\"}"},
      {"{{ d }}", "{'[key]': '[v]\\n'}"},
      {"{% set x %}<{{ s }}>{% endset %}{{ x | replace(' ', '') }}", "<[ab]>"},
      {"{% macro m(a) %}({{ a }}){% endmacro %}{{ m(s) | upper }}", "([ AB ])"},
      {"{% for w in words %}{{ loop.index ~ w }}{% endfor %}", "1[x]2[y]"},
      {"{{ s | indent(1, true) | title }}{{ s | string | list | first }}", " [ Ab  ]"},
      {"{% for k, v in d.items() %}{{ k }}:{{ v }}{% endfor %}", "[key]:[v\n]"}};
  for (const auto& [source, expected] : cases) EXPECT_EQ(with_origins(rendered(source, variables)), expected) << source;
  // Comparing ignores the origin.
  EXPECT_EQ(to_utf8(rendered("{{ 'x' in words and words[0] == 'x' and d['key'] }}", variables)), "v\n");
}

TEST(Language, MarksWhatIsGenerated) {
  std::string marked;
  for (const char32_t c : rendered("a{% generation %}b{{ 'c' | upper }}{% set x = 1 %}{% endgeneration %}d{{ x }}", {}))
    if (c & kLearned) append_utf8(marked, TextView(&c, 1));
  EXPECT_EQ(marked, "bC");
}

TEST(Language, KnowsTheDate) { EXPECT_EQ(rendered("{{ strftime_now('%d %b %Y') }}"), "25 Nov 2026"); }

TEST(Language, NamesTheLineOfAnError) {
  EXPECT_ERROR(rendered("a\n\n{% for i in [1] %}\n{{ missing.x }}\n{% endfor %}"),
               "line 4: missing, which is undefined");
  EXPECT_ERROR(rendered("\n{{ raise_exception('no ' ~ n) }}"), "line 2: no 7");
  EXPECT_ERROR(rendered("a\n{% if %}"), "line 2: expected a value");
  EXPECT_ERROR(rendered("a\n{% nosuch %}"), "line 2: unknown or unsupported block, found \"nosuch\"");
  EXPECT_ERROR(rendered("{{ n|nosuch }}"), "no filter is named \"nosuch\"");
}

// Work that never ends, memory without bounds, and recursion end in errors.
TEST(Language, HasLimits) {
  const std::string many = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}";
  const std::string end = "{% endfor %}{% endfor %}{% endfor %}";
  const auto nested = [](int n, const std::string& open, const std::string& inner, const std::string& close) {
    std::string text = inner;
    for (int i = 0; i < n; ++i) text = open + text + close;
    return text;
  };
  std::string doubled = "{% set s = 'abcdefgh' %}";
  for (int i = 0; i < 40; ++i) doubled += "{% set s = s + s %}";
  std::string shared = "{% set n = namespace(x=[]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}";
  const std::string name(500, 'k');
  std::string attributes;
  std::vector<std::pair<Value, Value>> members;
  for (int i = 100; i < 150; ++i) {
    const std::string other = name.substr(3) + std::to_string(i);
    attributes += "{% set s." + other + " = 1 %}", members.emplace_back(Value(other.c_str()), std::int64_t{1});
  }
  const Value long_keys = dict_of(std::move(members));
  const std::vector<std::pair<std::string, const char*>> cases = {
      {many + end, "too much work"},
      {doubled, "too much work"},
      {"{{ 'abcdefgh' * 1000000000 }}", "repeated more than 1000000 times"},
      {"{{ ('a' * 1000000) * 1000 }}", "too much work"},
      {"{% set s = 'a' * 9000 %}{{ s.replace('a', s) }}", "too much work"},
      {"{{ range(10000000) }}", "more than 100000 numbers"},
      {"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recurses more deeply"},
      {"{% for x in [[[]]] recursive %}{{ loop([[1]]) }}{% endfor %}", "recurses more deeply"},
      {"{% set n = namespace(x=[]) %}{% for i in range(999) %}{% set n.x = [n.x] %}{% endfor %}", "nested more deeply"},
      {"{{ " + nested(9999, "(", "1", ")") + " }}", "more than 150 levels"},
      {"{{ " + nested(9999, "[", "1", "]") + " }}", "more than 150 levels"},
      {"{{ " + nested(9999, "not ", "1", "") + " }}", "more than 150 levels"},
      {"{{ " + nested(9999, "-", "1", "") + " }}", "more than 150 levels"},
      {"{{ 1" + nested(9999, "+1", "", "") + " }}", "more than 5000 parts"},
      {nested(9999, "{% if n %}", "", "{% endif %}"), "more than 150 levels"},
      {std::string(2 << 20, 'x'), "more than 1048576 bytes"},
      {"{{ 9223372036854775807 + 1 }}", "too large"},
      {"{{ 2 ** 64 }}", "too large"},
      // Values that share parts, and functions that hold values
      {shared + "{{ n.x == n.x }}", "too much work"},
      {shared + "{{ 'x'.replace('x', n.x ~ '') }}", "too much work"},
      {shared + "{{ raise_exception(message=n.x) }}", "too much work"},
      {"{% set n = namespace(x=1) %}{% for i in range(9999) %}{% set n.x = [n.x].count %}{% endfor %}",
       "nested more deeply"},
      {"{{ ('a'|map(*(['map'] * 2000)))|list }}", "too much work"},
      // Searches, and results that are not printed
      {"{% set s = 'a' * 9999 %}{{ ('a' * 4999 ~ 'b') in s }}", "too much work"},
      {"{% set s = 'a' * 9999 %}{{ s.rsplit('a' * 4999 ~ 'b') }}", "too much work"},
      {"{% set s = 'b' * 9999 %}{{ s.strip('a' * 9999 ~ 'b') }}", "too much work"},
      {"{% for i in range(999) %}{% set x = 'a' * 9999 %}{% endfor %}", "too much work"},
      {"{% for i in range(999) %}{% set x = [1]|batch(9999, 'x') %}{% endfor %}", "too much work"},
      {"{% for i in range(999) %}{{ 'a' * 9999 }}{% endfor %}", "too much work"},
      {"{% for i in range(99) %}{% set x = n|string * 99999 %}{% endfor %}", "too much work"},
      // Reading attributes and members with long names
      {"{% set s = namespace() %}" + attributes + "{% for i in range(999) %}{{ s." + name + " }}{% endfor %}",
       "too much work"},
      {"{% set s = {} %}{% for i in range(99999) %}{% set x = loop." + name + " %}{% endfor %}", "too much work"},
      {"{% for i in range(999) %}{% set x = d.get('" + name + "') %}{% endfor %}", "too much work"},
      {"{% for i in range(99) %}{% set x = d == d %}{% endfor %}", "too much work"},
      {"{{ range(9999)|unique|list|length }}", "too much work"},
      {"{{ range(99)|tojson(indent='a' * 9999) }}", "an indent of more than 1000"}};
  for (const auto& [source, said] : cases) {
    const auto run = [&] {
      Template(source, "2026-11-25").render({{"n", std::int64_t{7}}, {"d", long_keys}}, 3'000'000);
    };
    EXPECT_ERROR(run(), said) << source.substr(0, 60);
  }
  // A long conversation is no hostile one.
  std::vector<Value> messages;
  for (int i = 0; i < 2000; ++i)
    messages.push_back(dict_of({{"role", "user"}, {"content", to_text(std::string(2000, 'x'), kData)}}));
  const std::string template_of_many =
      "{% for m in messages %}{% if loop.index0 == messages|length - 1 and messages[0].role == 'user' and "
      "messages is defined and (messages|first).content is string %}{{ m.content|trim + '.' }}{% endif %}{% endfor %}";
  EXPECT_EQ(Template(template_of_many, "2026-11-25").render({{"messages", messages}}).size(), 2001u);
  // What holds itself is freed.
  EXPECT_EQ(rendered("{% set n = namespace() %}{% set n.n = n %}{% macro m() %}{% endmacro %}{% set n.m = m %}x"), "x");
  EXPECT_EQ(rendered("{% set n = namespace() %}{% for i in list %}{% set n.c = loop.cycle %}{% endfor %}{{ n.c(1) }}"),
            "1");
}

}  // namespace
}  // namespace streambp::jinja
