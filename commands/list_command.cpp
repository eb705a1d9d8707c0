// streambp list: names that options take, where there are too many for --help.
#include "commands/command.h"
#include "commands/text.h"
#include "model/families.h"
#include "model/parameters.h"
#include "referee/defects.h"

namespace streambp {
namespace {

constexpr const char* kListDescription =
    "List the names that options take.\n\n"
    "  streambp list families    for --family: the families of models\n"
    "  streambp list models      for plan, bench and verify --model: published models\n"
    "  streambp list defects     for verify --defect: defects of trainers";

class ListCommand : public Command {
 public:
  explicit ListCommand(CLI::App& app) : Command(app, "list", kListDescription) {
    options.add("what", &what, "families, models or defects", checks::one_of({"families", "models", "defects"}));
    options.require("what");
  }

 private:
  void run() override {
    if (what == "families") {
      for (const ModelFamily& family : model_families()) print("%s\n", family.name);
    } else if (what == "models") {
      TextTable table({"model", "parameters", "family"}, TextTable::Last::text);
      for (const auto& [name, config] : known_models())
        table.add({name, human_count(static_cast<double>(parameter_count(config))), config.family});
      table.print();
    } else {
      for (const Defect& defect : all_defects()) print("%-24s %s\n", defect.name, defect.meaning);
    }
  }

  std::string what;
};

}  // namespace

std::unique_ptr<Command> list_command(CLI::App& app) { return std::make_unique<ListCommand>(app); }

}  // namespace streambp
