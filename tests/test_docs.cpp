// Checks README.md and docs/*.md against the program: links, paths, options, and the size of streambp.cuh and
// model.cuh. Also that their paragraphs are short.
#include <iterator>
#include <regex>
#include <set>
#include <sstream>

#include "data/files/files.h"
#include "tests/commands.h"

namespace streambp {
namespace {

const fs::path kRoot = STREAMBP_SOURCE;

std::vector<fs::path> documents() {
  std::vector<fs::path> files = {kRoot / "README.md", kRoot / "text/README.md"};
  for (const auto& entry : fs::directory_iterator(kRoot / "docs")) {
    if (entry.path().extension() == ".md") files.push_back(entry.path());
  }
  return files;
}

std::vector<std::smatch> matches(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern);
  return {std::sregex_iterator(text.begin(), text.end(), regex), std::sregex_iterator()};
}

TEST(Docs, EveryLinkAndPathExists) {
  for (const fs::path& document : documents()) {
    const std::string text = read_file(document);
    for (const std::smatch& link : matches(text, R"(\]\(([^)#:]+)\))")) {
      EXPECT_TRUE(fs::exists(document.parent_path() / link[1].str())) << document << ": " << link[1];
    }
    for (const std::smatch& path :
         matches(text, R"([ `]((?:scripts|tests|kernels|training|model|memory|text|data|commands)/)"
                       R"([a-z_/]+\.(?:cuh|cpp|cu|h|py|sh)))")) {
      EXPECT_TRUE(fs::exists(kRoot / path[1].str())) << document << ": " << path[1];
    }
  }
}

TEST(Docs, EveryOptionExists) {
  std::map<std::string, std::string> help;
  for (const fs::path& document : documents()) {
    const std::string text = read_file(document);
    for (const std::smatch& line :
         matches(text, R"(streambp (train|verify|plan|bench|eval|generate|tokenize|examples)\b([^`\n#]*))")) {
      const std::string command = line[1], arguments = line[2];
      if (!help.contains(command)) help[command] = execute(command + " --help-all").output;
      for (const std::smatch& option : matches(arguments, R"(--[a-z0-9-]+)")) {
        EXPECT_FALSE(matches(help[command], option.str() + "[^a-z0-9-]").empty())
            << document << ": " << command << " " << option.str();
      }
    }
  }
}

TEST(Docs, ReadmeStatesTheSizeOfTheCore) {
  const std::string text = read_file(kRoot / "README.md");
  const auto rows = matches(text, R"(\]\(([a-z/_]+\.[a-z]+)\) \| ([0-9]+) \|)");
  EXPECT_GE(rows.size(), 3u);
  for (const std::smatch& row : rows) {
    const std::string file = read_file(kRoot / row[1].str());
    const double lines = static_cast<double>(std::count(file.begin(), file.end(), '\n'));
    EXPECT_NEAR(lines, std::stod(row[2]), 0.05 * lines) << row[1];
  }
}

Index count_words(const std::string& line) {
  std::istringstream text(line);
  return std::distance(std::istream_iterator<std::string>(text), std::istream_iterator<std::string>());
}

// Nobody reads a longer paragraph, or a longer item of a list, to its end.
TEST(Docs, ParagraphsAreShort) {
  constexpr Index kWords = 120;
  const std::regex item(R"(^ *([-*]|[0-9]+\.) )");
  for (const fs::path& document : documents()) {
    std::istringstream text(read_file(document));
    std::string line, first;
    bool code = false;
    Index words = 0;
    const auto end_paragraph = [&] {
      EXPECT_LE(words, kWords) << document << ": " << first;
      words = 0;
    };
    while (std::getline(text, line)) {
      const bool fence = line.starts_with("```");
      if (fence) code = !code;
      const bool prose = !fence && !code && !line.starts_with("|") && !line.starts_with("#");
      if (!prose || line.empty() || std::regex_search(line, item)) end_paragraph();
      if (words == 0) first = line;
      if (prose) words += count_words(line);
    }
    end_paragraph();
  }
}

// docs/contributing.md has the arrows. What a room may include beside itself:
TEST(Docs, IncludesPointOneWay) {
  const std::map<std::string, std::string> rooms = {
      {"kernels", "-"},
      {"parallel", "kernels/"},
      {"model", "parallel/|kernels/"},
      {"memory", "model/|parallel/|kernels/"},
      {"generation", "memory/|model[./]|parallel/|kernels/"},
      {"text", "kernels/base/(error|unfinished)[.]h"},
      {"data", "text/|model/|parallel/|kernels/base/"},
      {"training", "generation/|streambp[.]|memory/|model[./]|parallel/|kernels/|data/|text/"},
      {"referee", "training/|generation/|streambp[.]|memory/|model[./]|parallel/|kernels/|data/|text/"}};
  for (const auto& [room, others] : rooms) {
    std::size_t includes = 0;
    const std::regex allowed("(" + room + "/|" + others + ").*");
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / room)) {
      if (!entry.is_regular_file()) continue;
      const std::string source = read_file(entry.path());
      for (const std::smatch& include : matches(source, "\n#include \"([^\"]+)\"")) {
        EXPECT_TRUE(std::regex_match(include[1].str(), allowed)) << entry.path() << " includes " << include[1];
        ++includes;
      }
    }
    EXPECT_GT(includes, 4u) << room;
  }
}

TEST(Docs, TheReadmeCitesThePaper) {
  const std::string text = read_file(kRoot / "README.md");
  for (const char* part :
       {"@misc{luo2025streambp,", "2506.03077", "Luo, Qijun", "docs/recipes.md", "docs/troubleshooting.md"})
    EXPECT_NE(text.find(part), std::string::npos) << part;
}

}  // namespace
}  // namespace streambp
