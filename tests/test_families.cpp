// Families are descriptions, which a program can add to.
#include "tests/support.cuh"

namespace streambp {
namespace {

TEST(Families, AreListedInTheDocs) {
  const std::string page = read_file(fs::path(STREAMBP_SOURCE) / "docs/models.md");
  for (const ModelFamily& family : model_families())
    EXPECT_TRUE(contains(page, "`" + std::string(family.type) + "`")) << family.type;
  for (const Tower& tower : kTowers) EXPECT_TRUE(contains(page, "`" + std::string(tower.type) + "`")) << tower.type;
}

// A program may add a family. It is read and computed like the others.
TEST(Families, CanBeAdded) {
  ModelFamily mine = llama();
  mine.name = mine.type = "mine", mine.architecture = "MineForCausalLM", mine.published = {};
  mine.defaults.pre_norms = false, mine.defaults.post_norms = true;
  mine.modules.post_attention_norm = "after_attention", mine.modules.post_mlp_norm = "after_mlp";
  model_families().push_back(mine);
  const Config c = make_config("mine", {61, 30, 2, 6, 2, 10, 50, 128, false});
  EXPECT_EQ(config_to_json(config_from_json(config_to_json(c), "config.json")), config_to_json(c));
  const Batch batch = packed(c, {40, 60});
  expect_oracle(run_gradient<Cpu, double>(c, batch, Schedule::stream(kTile, kTile), random_weights()),
                oracle_gradient(c, batch, random_weights()));
  model_families().pop_back();
}

}  // namespace
}  // namespace streambp
