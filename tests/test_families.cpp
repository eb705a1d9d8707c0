// Phi-3: in its files q, k and v are one tensor, and so are gate and up. And families as descriptions.
#include "data/files/adapters.h"
#include "tests/support.cuh"

namespace streambp {
namespace {

class FusedTensors : public TemporaryDirectory {
 protected:
  const Config& config() {
    //                               vocabulary hidden layers heads kv dim mlp length tied
    static const Config c = make_config("phi3", {61, 30, 2, 6, 2, 10, 50, 128, false});
    return c;
  }
};

TEST_F(FusedTensors, IsReadFromConfigJsonAndWritten) {
  const Json published = Json::parse(R"({"architectures": ["Phi3ForCausalLM"], "attention_bias": false,
      "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "bos_token_id": 1, "embd_pdrop": 0.0,
      "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192,
      "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32,
      "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
      "rope_scaling": null, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": false,
      "vocab_size": 32064})");
  const Config c = config_from_json(published, "config.json");
  EXPECT_EQ(c.window, 2047);
  EXPECT_EQ(c.head_dim, 96);
  EXPECT_EQ(parameter_count(c), 3'821'079'552);
  EXPECT_EQ(config_to_json(config_from_json(config_to_json(c), "config.json")), config_to_json(c));
  EXPECT_EQ(config_to_json(known_models().at("phi-3-mini-4k")), config_to_json(c));
  Json other = published;
  other["embedding_multiplier"] = 12;
  EXPECT_ERROR(config_from_json(other, "config.json"), "embedding_multiplier");
}

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

TEST_F(FusedTensors, ItsModelsAreSavedInPartsOfDifferentSizesAndLoaded) {
  const Config& c = config();
  Cpu dev(std::size_t{1} << 22);
  Model<float> model{c, Tensors<float>(c)}, loaded{c, Tensors<float>(c)};
  allocate_weights(dev, model), allocate_weights(dev, loaded);
  initialise(dev, model, 1, 0.1);
  save_model(dev, dir, model, ModelLayout(c));
  EXPECT_EQ(config_to_json(read_config(dir)), config_to_json(c));
  load_model(dev, dir, loaded);
  const auto from = table(c, model.weights), to = table(c, loaded.weights);
  for (std::size_t i = 0; i < from.size(); ++i)
    EXPECT_EQ(to_host(dev, *from[i].matrix), to_host(dev, *to[i].matrix)) << from[i].parameter.name;

  const SafetensorsFile file(dir / "model.safetensors");
  const auto expect_stored = [&](const std::string& name, const std::vector<Matrix<float>>& parts) {
    const Tensor& tensor = file.at("model.layers.1." + name + ".weight");
    std::vector<float> expected;
    Index rows = 0;
    for (const Matrix<float>& part : parts) {
      const std::vector<float> numbers = to_host(dev, part);
      expected.insert(expected.end(), numbers.begin(), numbers.end());
      rows += part.rows;
    }
    EXPECT_EQ(tensor.shape, (std::vector<std::int64_t>{rows, parts[0].cols})) << name;
    EXPECT_EQ(numbers<float>(tensor), expected) << name;
  };
  const Layer<float>& w = model.weights.layers[1];
  expect_stored("self_attn.qkv_proj", {w.q.weight, w.k.weight, w.v.weight});
  expect_stored("mlp.gate_up_proj", {w.gate.weight, w.up.weight});
  expect_stored("self_attn.o_proj", {w.o.weight});
}

TEST_F(FusedTensors, ItsGradientsAreExactInEveryMode) {
  const auto expect_exact = [](const Config& c) {
    const Batch batch = packed(c, {150, 200});
    const oracle::Result truth = oracle_gradient(c, batch, random_weights());
    for (const Mode mode : kModes) {
      const Schedule schedule = schedule_for(mode, c, batch.size(), kTile);
      expect_oracle(run_gradient<Cpu, double>(c, batch, schedule, random_weights()), truth, name(mode));
    }
  };
  expect_exact(config());
  Config adapted = config();
  adapted.adapters = new_adapters(adapted, {3, 6, false, {"all"}});
  adapted.trained.emplace();
  EXPECT_EQ(adapted.adapters.size(), 8u);
  expect_exact(adapted);
}

}  // namespace
}  // namespace streambp
