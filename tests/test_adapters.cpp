// Adapters in PEFT's files, against golden data made by PEFT (scripts/make_adapter_golden.py).
#include "data/files/merge.h"
#include "tests/golden.h"
#include "tests/temporary.h"

namespace streambp {
namespace {

fs::path adapter_folder(const std::string& name) { return golden_folder().parent_path() / "golden_adapters" / name; }

class PeftCase : public TemporaryDirectory, public testing::WithParamInterface<std::string> {};
INSTANTIATE_TEST_SUITE_P(Adapters, PeftCase,
                         testing::Values("gpt2", "llama_patterns", "qwen3_rslora", "gemma3_and_norms", "qwen3_moe",
                                         "gpt_oss", "mixtral_down"),
                         [](const auto& info) { return info.param; });

// A model with the adapters of a case.
struct Adapted {
  explicit Adapted(const std::string& name)
      : directory(adapter_folder(name)),
        truth(adapter_folder(name) / "gradient.safetensors"),
        base(truth.metadata().at("base")),
        config(base.config) {
    directory.add_to(config);
  }
  auto weights() const {
    return [this](auto& dev, auto& model) {
      read_tensors(dev, base.file, "weights/", without_adapters(table(model.config, model.weights)));
      directory.load(dev, model);
    };
  }

  AdapterDirectory directory;
  SafetensorsFile truth;
  Golden base;
  Config config;
};

// The tensors of PEFT's gradient by the names of parameters.
struct GradientsOfPeft {
  const Adapted& adapted;
  const Tensor& at(const std::string& name) const {
    return adapted.truth.at("grad/" + name_in_adapter(adapted.config, name));
  }
};

template <class T>
void expect_gradient_of_peft(const std::string& name, double tolerance) {
  const Adapted a(name);
  const HostGradient truth = golden_gradient(GradientsOfPeft{a}, "", a.config);
  const auto loss = numbers<double>(a.truth.at("loss")), logp = numbers<double>(a.truth.at("logp"));
  for (const GradientRun& run : expect_golden<T>(truth, loss[0], tolerance, a.config, a.base.batch, a.weights())) {
    for (std::size_t t = 0; t < logp.size(); ++t) ASSERT_NEAR(run.logp[t], logp[t], 10 * tolerance) << "token " << t;
  }
}
TEST_P(PeftCase, Float64AgreesTo1em10) { expect_gradient_of_peft<double>(GetParam(), 1e-10); }
TEST_P(PeftCase, Float32AgreesTo1em5) { expect_gradient_of_peft<float>(GetParam(), 1e-5); }

// Every tensor of the file is trained, and every trained parameter is in the file.
TEST_P(PeftCase, TrainsExactlyTheTensorsOfTheFile) {
  const Adapted a(GetParam());
  std::set<std::string> in_file, in_table;
  for (const auto& [name, tensor] : a.truth.tensors())
    if (name.starts_with("grad/")) in_file.insert(name.substr(5));
  Tensors<float> none(a.config);
  for (const auto& e : trained(table(a.config, none))) in_table.insert(name_in_adapter(a.config, e.parameter.name));
  EXPECT_EQ(in_file, in_table);
}

TEST_P(PeftCase, SavingAndLoadingLosesNoBit) {
  const Adapted a(GetParam());
  Cpu dev(std::size_t{1} << 22);
  Trainer<Cpu, float> trainer(dev, a.config, 1, OptimizerKind::none);
  a.weights()(dev, trainer.model);
  save_adapters(dev, dir, a.config, trained(table(a.config, trainer.model.weights)), a.directory.config);
  const SafetensorsFile saved(dir / "adapter_model.safetensors"),
      original(adapter_folder(GetParam()) / "adapter_model.safetensors");
  ASSERT_EQ(saved.tensors().size(), original.tensors().size());
  for (const auto& [name, tensor] : saved.tensors()) {
    ASSERT_EQ(tensor.shape, original.at(name).shape) << name;
    EXPECT_EQ(std::memcmp(tensor.data, original.at(name).data, tensor.bytes), 0) << name;
  }
  EXPECT_EQ(read_file(dir / "adapter_config.json"), read_file(adapter_folder(GetParam()) / "adapter_config.json"));
}

// The merged model gives the log-probs of base and adapters.
TEST_P(PeftCase, MergedModelsComputeTheSame) {
  const Adapted a(GetParam());
  const fs::path base = dir / "base", merged = dir / "merged";
  fs::create_directories(base), fs::create_directories(merged);
  Cpu dev(std::size_t{1} << 22);
  Trainer<Cpu, float> trainer(dev, a.base.config, 1, OptimizerKind::none);
  a.base.weights()(dev, trainer.model);
  save_model(dev, base, trainer.model, ModelLayout(a.base.config));
  const ModelLayout layout(base);
  Merge(base, adapter_folder(GetParam()), a.config).save(merged, layout);

  const Schedule schedule = Schedule::full(a.base.batch.size());
  const GradientRun with = run_gradient<Cpu, double>(a.config, a.base.batch, schedule, a.weights());
  const GradientRun of_merged = run_gradient<Cpu, double>(
      a.base.config, a.base.batch, schedule, [&](auto& dev, auto& model) { load_model(dev, merged, model); });
  for (std::size_t t = 0; t < with.logp.size(); ++t) EXPECT_NEAR(of_merged.logp[t], with.logp[t], 1e-5) << t;
  EXPECT_GT(std::abs(with.loss - a.base.numbers<double>("loss")[0]), 0.01) << "the adapters change nothing";
  EXPECT_EQ(config_to_json(read_config(merged)), config_to_json(a.base.config));
}

// The parameters of PEFT's experts are named, and no others.
TEST_F(TemporaryDirectory, AdaptersOfExpertsNeedTheirParameters) {
  fs::copy(adapter_folder("qwen3_moe"), dir, fs::copy_options::recursive);
  const Json config = Json::parse(read_file(dir / "adapter_config.json"));
  const auto refusal = [&](const Json& parameters) {
    Json changed = config;
    changed["target_parameters"] = parameters;
    write_file_atomically(dir / "adapter_config.json", changed.dump());
    Config c = Golden("qwen3_moe").config;
    return error_of([&] { AdapterDirectory(dir).add_to(c); });
  };
  Json all = config.at("target_parameters");
  EXPECT_EQ(refusal(all), "");
  EXPECT_PRED2(contains, refusal({"mlp.gate.weight"}), "is of experts, but \"target_parameters\"");
  EXPECT_PRED2(contains, refusal({"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}), "has an adapter of");
  all.push_back("self_attn.q_proj.weight");
  EXPECT_PRED2(contains, refusal(all), "\"self_attn.q_proj.weight\" is not supported");
}

// --- Files that are refused, with the reason ---

class RefusedAdapters : public TemporaryDirectory {
 protected:
  void SetUp() override {
    TemporaryDirectory::SetUp();
    fs::copy(adapter_folder("qwen3_rslora"), dir, fs::copy_options::recursive);
    config_ = Json::parse(read_file(dir / "adapter_config.json"));
  }
  std::string refusal() {
    write_file_atomically(dir / "adapter_config.json", config_.dump());
    Config c = Golden("qwen3").config;
    return error_of([&] { AdapterDirectory(dir).add_to(c); });
  }
  void expect(const std::string& reason) { EXPECT_PRED2(contains, refusal(), reason); }
  void expect_with(const char* field, const Json& value, const std::string& reason) {
    const Json before = config_;
    config_[field] = value;
    expect(reason);
    config_ = before;
  }

  Json config_;
};

TEST_F(RefusedAdapters, OtherMethods) {
  expect_with("peft_type", "IA3", "\"peft_type\": \"IA3\" is not supported; only LORA is");
  expect_with("use_dora", true, "\"use_dora\"");
  expect_with("lora_bias", true, "\"lora_bias\"");
  expect_with("bias", "all", "\"bias\"");
  expect_with("layer_replication", Json::array({Json::array({0, 1})}), "\"layer_replication\"");
  expect_with("a_new_method", Json{{"strength", 1}}, "\"a_new_method\"");
  expect_with("init_lora_weights", "pissa", "\"pissa\" is not supported; convert it to plain LoRA");
}

TEST_F(RefusedAdapters, WrongValues) {
  expect_with("r", 7, "says that its rank is 7");
  expect_with("r", "five", "\"r\" has the value \"five\"");
  expect_with("lora_alpha", "x", "\"lora_alpha\"");
  expect_with("alpha_pattern", {{"(q_proj", 3}}, "\"alpha_pattern\": \"(q_proj\" is not a regular expression");
  expect_with("modules_to_save", {"("}, "\"modules_to_save\": \"(\" is not a regular expression");
  expect_with("alpha_pattern", {{"q_proj", "3"}}, "has no number");
  expect_with("rank_pattern", {{"q_proj", 3}}, "says that its rank is 3");
  expect_with("rank_pattern", {{"q_proj", 5.5}}, "says that its rank is 5.5");
  expect_with("r", std::uint64_t{1} << 63, "\"r\" has the value");
  expect_with("lora_alpha", 1e300, "\"lora_alpha\" is too large");
  config_ = Json::array();
  expect("expected a JSON object");
}

TEST_F(RefusedAdapters, OtherTensors) {
  const SafetensorsFile original(adapter_folder("qwen3_rslora") / "adapter_model.safetensors");
  auto with = [&](const std::string& from, const std::string& to, const std::string& reason) {
    SafetensorsWriter writer(dir / "adapter_model.safetensors", {});
    for (const auto& [name, tensor] : original.tensors())
      writer.add(name == from ? to : name, tensor.dtype, tensor.shape, tensor.data, tensor.bytes);
    writer.finish();
    expect(reason);
  };
  const std::string layer = "base_model.model.model.layers.0.self_attn.q_proj.", a = layer + "lora_A.weight";
  with(a, layer + "lora_magnitude_vector.weight", "DoRA is not supported");
  with(a, "base_model.model.lm_head.lora_A.weight", "\"lm_head\" is not supported");
  with(a, "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", "is not supported");
  with(a, "model.layers.0.self_attn.q_proj.lora_A.weight", "does not begin with base_model.model.");
  with(a, layer + "unknown", "is not a parameter of the model");
  with(layer + "lora_B.weight", "base_model.model.model.norm.weight", "no tensor \"" + layer + "lora_B.weight\"");
}

TEST_F(RefusedAdapters, IncompleteFiles) {
  const SafetensorsFile original(adapter_folder("qwen3_rslora") / "adapter_model.safetensors");
  SafetensorsWriter writer(dir / "adapter_model.safetensors", {});
  for (const auto& [name, tensor] : original.tensors())
    if (!contains(name, "layers.1.mlp.up_proj"))
      writer.add(name, tensor.dtype, tensor.shape, tensor.data, tensor.bytes);
  writer.finish();
  expect("has no adapter of model.layers.1.mlp.up_proj, which ");
  config_["exclude_modules"] = "model.layers.1.mlp.up_proj";
  config_["modules_to_save"] = {"lm_head"};
  expect("has no tensor of \"lm_head\", which \"modules_to_save\" lists");
}

TEST_F(RefusedAdapters, ModulesOutsideTheLayers) {
  Json targets = linear_layers(Golden("qwen3").config);
  for (const auto& [module, name] : {std::pair{"lm_head", "lm_head"}, {"embed_tokens", "model.embed_tokens"}}) {
    targets.push_back(module);
    expect_with("target_modules", targets, std::string("has no adapter of ") + name);
    targets.erase(targets.size() - 1);
  }
}

// The golden file has adapters of all linear layers of both layers.
TEST_F(RefusedAdapters, LayersThatTheConfigurationDoesNotName) {
  const std::string first = "has an adapter of model.layers.0.", second = "has an adapter of model.layers.1.";
  expect_with("target_modules", {"q_proj", "mlp.up_proj"}, first);
  expect_with("target_modules", nullptr, first);
  expect_with("target_modules", Json::array(), first);
  expect_with("target_modules", "model\\.layers\\.0\\..*", second);
  expect_with("target_modules", ".*_pro", first);
  expect_with("layers_to_transform", 0, second + "self_attn.q_proj, which " + path("adapter_config.json"));
  expect_with("layers_to_transform", {1, 7}, first);
  expect_with("exclude_modules", {"1.mlp.up_proj"}, second + "mlp.up_proj, ");
  expect_with("exclude_modules", ".*1.*up_proj", second + "mlp.up_proj, ");
  expect_with("modules_to_save", {"1.mlp"}, second + "mlp.gate_proj, ");
  expect_with("layers_to_transform", "1", "\"1\" is not a layer");
  expect_with("target_modules", {"q_proj", 3}, "3 is not a name");
  expect_with("layers_pattern", "layers", "needs \"layers_to_transform\"");
  config_["layers_to_transform"] = {0, 1};
  expect_with("layers_pattern", {"h", "blocks"}, first);
  expect_with("target_modules", "all-linear", "need a list");
}

TEST_F(RefusedAdapters, UnlessTheyAreNamedInAnotherWay) {
  const auto accept_with = [&](const std::map<std::string, Json>& fields) {
    const Json before = config_;
    for (const auto& [field, value] : fields) config_[field] = value;
    EXPECT_EQ(refusal(), "") << Json(fields);
    config_ = before;
  };
  Json whole = Json::array();
  for (const std::string& layer : linear_layers(Golden("qwen3").config)) whole.push_back(layer);
  accept_with({{"target_modules", whole}});
  accept_with({{"target_modules", whole}, {"layers_to_transform", 7}});
  accept_with({{"target_modules", "All-Linear"}});
  accept_with({{"target_modules",
                "(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|"
                "(?:\\bmodel\\.layers\\.[\\d]{1,}\\.(?:self_attn|mlp)\\."
                "(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)))"}});
  accept_with({{"layers_to_transform", {1, 0}}});
  accept_with({{"layers_to_transform", {0, 1, 2}}, {"layers_pattern", {"h", "layers"}}});
  accept_with({{"layers_to_transform", {0, 1}}, {"layers_pattern", "model.layers"}});
  accept_with({{"layers_to_transform", Json::array()}, {"layers_pattern", ""}, {"exclude_modules", ""}});
  accept_with({{"exclude_modules", {"lm_head", "roj", "layers.7.mlp.up_proj"}}});
}

// Many entries take linear time.
TEST_F(RefusedAdapters, TooManyPatterns) {
  for (int i = 0; i < 50'000; ++i) config_["loftq_config"]["key-" + std::to_string(i)] = i;
  Json& patterns = config_["rank_pattern"];
  for (int i = 0; i < 4096; ++i) patterns["layer-" + std::to_string(i)] = 3;
  ASSERT_EQ(refusal(), "");
  const AdapterDirectory directory(dir);
  EXPECT_EQ(Json::parse(directory.config_for("elsewhere"))["base_model_name_or_path"], "elsewhere");
  patterns["one.more"] = 3;
  expect("\"rank_pattern\": has more than 4096 entries; write fewer");
}

TEST(Adapters, NamesOfLinearLayers) {
  const Config c = Golden("qwen3").config, gpt2 = Golden("gpt2").config;
  EXPECT_EQ(new_adapters(c, {2, 4, false, {"all"}}).size(), 14u);
  EXPECT_EQ(new_adapters(c, {2, 4, false, {"attention"}}).size(), 8u);
  EXPECT_EQ(new_adapters(c, {2, 4, false, {"q_proj", "model.layers.1.mlp.up_proj"}}).size(), 3u);
  EXPECT_EQ(new_adapters(gpt2, {2, 4, false, {"all"}}).size(), 8u);
  EXPECT_EQ(new_adapters(gpt2, {2, 4, false, {"attention"}}).size(), 4u);
  EXPECT_EQ(new_adapters(gpt2, {2, 4, false, {"mlp.c_proj"}}).size(), 2u);
  EXPECT_THROW(new_adapters(c, {2, 4, false, {"proj"}}), Error);
  EXPECT_DOUBLE_EQ(new_adapters(c, {4, 8, true, {"q_proj"}}).begin()->second.scale, 4);
  EXPECT_DOUBLE_EQ(new_adapters(c, {4, 8, false, {"q_proj"}}).begin()->second.scale, 2);
}

}  // namespace
}  // namespace streambp
