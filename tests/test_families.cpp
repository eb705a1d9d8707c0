// Families are descriptions, which a program can add to. Parts that take turns in a tensor.
#include "data/files/merge.h"
#include "tests/training.h"

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

// Attention with a gate: in files, the queries and the gate of each head follow each other in q_proj.
class PartsInTurns : public TemporaryDirectory {
 protected:
  void SetUp() override {
    TemporaryDirectory::SetUp();
    ModelFamily gated = llama();
    gated.name = gated.type = "gated", gated.architecture = "GatedForCausalLM", gated.published = {};
    gated.defaults.attention_gate = true;
    model_families().push_back(gated);
    //                         vocabulary hidden layers heads kv dim mlp length tied
    config = make_config("gated", {61, 30, 2, 3, 1, kTurn, 50, 128, false});
    config.qkv_bias = config.output_bias = true;
  }
  void TearDown() override {
    model_families().pop_back();
    TemporaryDirectory::TearDown();
  }

  // A file with these tensors. Every number is that of its row.
  fs::path numbered(const Table<float>& table, const std::string& prefix = "") {
    std::list<std::vector<float>> numbers;
    SafetensorsWriter writer(dir / "numbered.safetensors", {});
    for (const Table<float>& parts : by_stored_tensor(table)) {
      const Parameter& p = parts.front().parameter;
      const auto shape = stored_shape(parts);
      std::vector<float>& values = numbers.emplace_back(static_cast<std::size_t>(element_count(p.name, shape)));
      for (Index i = 0; i < std::ssize(values); ++i)
        values[static_cast<std::size_t>(i)] = static_cast<float>(p.transposed        ? i % shape[1]
                                                                 : shape.size() == 1 ? i
                                                                                     : i / shape[1]);
      writer.add(prefix + p.name, "F32", shape, values.data(), 4 * values.size());
    }
    writer.finish();
    return dir / "numbered.safetensors";
  }

  // Reads such a file, each rank its shard, and checks where every row went. Writing gives the same file.
  void expect_rows(const Config& c, const Table<float>& table, const Group& ranks = {}) {
    Cpu dev(std::size_t{1} << 20);
    const SafetensorsFile file(numbered(table));
    allocate(dev, table, Kind::weights, ranks);
    read_tensors(dev, file, "", table, ranks);
    for (const Entry<float>& e : table) {
      const Parameter& p = e.parameter;
      const Index first = shard(p.rows, ranks).begin;
      for (Index i = 0; i < e.matrix->size(); ++i) {
        const Index line = p.vector() ? i : first + i / p.cols;
        const Index row = contains(p.name, "q_proj") && !contains(p.name, "lora_A")
                              ? line / kTurn * 2 * kTurn + p.part * kTurn + line % kTurn
                              : line;
        ASSERT_EQ(e.matrix->data[i], static_cast<float>(row)) << p.name << "#" << p.part << ", " << i;
      }
    }
    if (ranks.size > 1) return;
    SafetensorsWriter writer(dir / "written.safetensors", {});
    write_tensors(dev, writer, "", table);
    writer.finish();
    EXPECT_EQ(read_file(dir / "written.safetensors"), read_file(dir / "numbered.safetensors")) << c.family;
  }

  static constexpr Index kTurn = 4;
  Config config;
};

TEST_F(PartsInTurns, AreReadAndWritten) {
  config.adapters = new_adapters(config, {3, 6, false, {"all"}});
  Tensors<float> w(config);
  const Table<float> all = table(config, w);
  EXPECT_EQ(std::ranges::count_if(all, [](const auto& e) { return e.parameter.turn == kTurn; }), 2 * 2 * 3);
  expect_rows(config, all);
  for (const Index rank : {0, 1, 2, 3, 4}) expect_rows(config, without_adapters(all), {rank, 5});
  model_families().back().modules.transposed = true;
  Tensors<float> transposed(config);
  expect_rows(config, table(config, transposed));
}

// The gate has rows of the adapter's b, and its a is that of the queries.
TEST_F(PartsInTurns, AreOneLayerForAdapters) {
  config.adapters = new_adapters(config, {3, 6, false, {"q_proj"}});
  config.trained.emplace();
  EXPECT_EQ(config.adapters.size(), 2u);
  Cpu dev(std::size_t{1} << 22);
  Config base = config;
  base.adapters.clear(), base.trained.reset();
  Model<float> model{base, Tensors<float>(base)}, adapted{config, Tensors<float>(config)};
  allocate_weights(dev, model), allocate_weights(dev, adapted);
  initialise(dev, model, 1, 0.1), initialise(dev, adapted, 2, 0.1);
  const Layer<float>& w = adapted.weights.layers[1];
  EXPECT_EQ(w.gate_of_attention().adapter.a.data, w.q.adapter.a.data);
  EXPECT_EQ(w.gate_of_attention().adapter.b.rows, 3 * kTurn);
  for (const char* name : {"base", "adapter", "merged"}) fs::create_directory(dir / name);
  save_model(dev, dir / "base", model, ModelLayout(base));
  save_adapters(dev, dir / "adapter", config, trained(table(config, adapted.weights)),
                adapter_config(config, {3, 6, false, {"q_proj"}}, "base"));
  Merge(dir / "base", dir / "adapter", config).save(dir / "merged", ModelLayout(dir / "base"));

  // As PEFT merges, row by row of the files.
  const SafetensorsFile before(dir / "base/model.safetensors"), after(dir / "merged/model.safetensors"),
      adapter(dir / "adapter/adapter_model.safetensors");
  const std::string name = "model.layers.1.self_attn.q_proj", in_peft = "base_model.model." + name;
  const auto from = numbers<float>(before.at(name + ".weight")), to = numbers<float>(after.at(name + ".weight"));
  const auto a = numbers<float>(adapter.at(in_peft + ".lora_A.weight")),
             b = numbers<float>(adapter.at(in_peft + ".lora_B.weight"));
  ASSERT_EQ(b.size(), std::size_t{2 * 3 * kTurn * 3});
  for (std::size_t i = 0; i < to.size(); ++i) {
    float expected = from[i];
    for (std::size_t r = 0; r < 3; ++r) expected += 2 * b[i / 30 * 3 + r] * a[r * 30 + i % 30];
    ASSERT_NEAR(to[i], expected, 1e-5) << i;
  }
}

// Moments in 8 bits, their scales, and those of biases.
TEST_F(PartsInTurns, HaveOptimizerStatesThatAreReadBack) {
  Cpu dev(std::size_t{1} << 24);
  Trainer<Cpu, float> trainer(dev, config, 1, OptimizerKind::adamw_8bit);
  trainer.optimizer->for_each_state(config, [&](const std::string& state, const auto& rows) {
    using T = std::decay_t<decltype(*rows[0].matrix->data)>;
    std::vector<std::vector<T>> expected;
    for (const auto& e : rows) {
      for (Index i = 0; i < e.matrix->size(); ++i) e.matrix->data[i] = static_cast<T>((i + std::ssize(expected)) % 99);
      expected.push_back(to_host(dev, *e.matrix));
    }
    SafetensorsWriter writer(dir / "state.safetensors", {});
    write_tensors(dev, writer, "", rows);
    writer.finish();
    for (const auto& e : rows) std::fill_n(e.matrix->data, e.matrix->size(), T(100));
    read_tensors(dev, SafetensorsFile(dir / "state.safetensors"), "", rows);
    for (std::size_t i = 0; i < rows.size(); ++i)
      EXPECT_EQ(to_host(dev, *rows[i].matrix), expected[i]) << state << rows[i].parameter.name;
  });
}

}  // namespace
}  // namespace streambp
