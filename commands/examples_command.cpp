// streambp examples: data to try things out with.
#include "commands/command.cuh"
#include "commands/options.cuh"
#include "data/documents/examples.cuh"
#include "data/files/files.cuh"

namespace streambp {
namespace {

class ExamplesCommand : public Command {
 public:
  explicit ExamplesCommand(CLI::App& parent) {
    CLI::App& app = *parent.add_subcommand(
        "examples",
        "Write example data, to see its form and to try training with it.\n\n"
        "  streambp examples preferences --out preferences.jsonl   two answers each, of which the courteous is "
        "preferred\n"
        "  streambp examples answers --out answers.jsonl           such answers of either kind, to learn first\n"
        "  streambp examples groups --out groups.jsonl             several such answers each, the courteous rewarded\n"
        "  streambp examples arithmetic --out sums.jsonl           sums, with and without what is to be carried\n"
        "  streambp examples stories --out stories.txt             what a model learns that is trained from scratch");
    app.add_option("what", what, "preferences, answers, groups, arithmetic or stories")
        ->check(CLI::IsMember({"preferences", "answers", "groups", "arithmetic", "stories"}))
        ->required();
    app.add_option("--count", count, "How many")->check(CLI::Range(1, 1 << 24))->capture_default_str();
    app.add_option("--seed", seed, "Another seed, other examples")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    app.add_option("--out", out, "The file to write")->required();
    app.callback([this] { run(); });
  }

 private:
  void run() const {
    write_file_atomically(out, [&](std::ostream& file) {
      for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(count); ++i) {
        if (what == "stories") {
          file << (i > 0 ? "\n" : "") << story(seed, i).text;
        } else {
          const auto example = what == "preferences" ? preference_example
                               : what == "answers"   ? answer_example
                               : what == "groups"    ? group_example
                                                     : arithmetic_example;
          file << example(seed, i).dump() << "\n";
        }
      }
    });
    std::printf("%s: %ld examples of %s\n", out.c_str(), count, what.c_str());
  }

  std::string what, out;
  Index count = 2000;
  std::uint64_t seed = 1;
};

}  // namespace

std::unique_ptr<Command> examples_command(CLI::App& app) { return std::make_unique<ExamplesCommand>(app); }

}  // namespace streambp
