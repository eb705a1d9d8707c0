// streambp examples: data to try training with.

#include "commands/command.h"
#include "data/documents/examples.h"
#include "data/files/files.h"

namespace streambp {
namespace {

constexpr const char* kExamplesDescription =
    "Write example data that shows the formats and can be used to try training.\n\n"
    "  streambp examples preferences --out preferences.jsonl   pairs of answers; the polite one is chosen\n"
    "  streambp examples answers --out answers.jsonl           such answers of both kinds, for SFT\n"
    "  streambp examples groups --out groups.jsonl             groups of such answers, with rewards\n"
    "  streambp examples arithmetic --out sums.jsonl           sums with their answers, with and without carrying\n"
    "  streambp examples stories --out stories.txt             a text to train on from scratch";

class ExamplesCommand : public Command {
 public:
  explicit ExamplesCommand(CLI::App& app) : Command(app, "examples", kExamplesDescription) {
    options.add("what", &what, "preferences, answers, groups, arithmetic or stories",
                checks::one_of({"preferences", "answers", "groups", "arithmetic", "stories"}));
    options.add("--count", &count, "Number of examples", checks::between(1, 1 << 24));
    options.add("--seed", &seed, "Random seed");
    options.add("--out", &out, "The file to write");
    options.require("what"), options.require("--out");
  }

 private:
  void run() override {
    require_writable(out);
    std::ifstream old(out);  // it may hold such examples, but nothing else
    for (std::uint64_t i = 0; old.peek() != EOF && old.good(); ++i) {
      const std::string expected = example(i);
      std::string found(expected.size(), '\0');
      old.read(found.data(), static_cast<std::streamsize>(found.size()));
      require(found == expected, out, ": exists and holds something else; name another file, or remove this one");
    }
    write_file_atomically(out, [&](std::ostream& file) {
      for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(count); ++i) file << example(i);
    });
    print("%s: %ld examples of %s\n", out, count, what);
  }

  std::string example(std::uint64_t i) const {
    if (what == "stories") return (i > 0 ? "\n" : "") + story(seed, i).text;
    const auto make = what == "preferences" ? preference_example
                      : what == "answers"   ? answer_example
                      : what == "groups"    ? group_example
                                            : arithmetic_example;
    return make(seed, i).dump() + "\n";
  }

  std::string what, out;
  Index count = 2000;
  std::uint64_t seed = 1;
};

}  // namespace

std::unique_ptr<Command> examples_command(CLI::App& app) { return std::make_unique<ExamplesCommand>(app); }

}  // namespace streambp
