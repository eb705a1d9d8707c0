// The plan: its memory matches the arena to the byte, its chunks and lengths are the largest that fit, and the
// advertised lengths fit.
#include "commands/step_progress.h"
#include "data/files/checkpoint.h"
#include "tests/support.cuh"

namespace streambp {
namespace {

// A whole training step, optimizer included, on the Cpu device in an arena of exactly the planned size.
template <class T>
void expect_plan_is_the_arena(const Config& c, Index rows, const Schedule& schedule, OptimizerKind kind,
                              Index micro_batches, const std::string& what) {
  constexpr DType type = sizeof(T) == 8 ? DType::f64 : sizeof(T) == 4 ? DType::f32 : DType::bf16;
  const StepSettings settings{c, type, kind, micro_batches};
  const Usage usage = plan(settings, rows, schedule);
  Cpu dev(usage.peak);
  Trainer<Cpu, T> trainer(dev, c, rows, kind);
  trainer.initialise(1, 0.1);
  std::vector<Batch> batches;
  for (Index i = 0; i < micro_batches; ++i) batches.push_back(packed(c, {rows}, static_cast<std::uint64_t>(i)));
  if (kind == OptimizerKind::none) {
    trainer.accumulate(batches, schedule);
  } else {
    trainer.step(batches, schedule, OptimizerSettings{}, 1);
  }
  EXPECT_EQ(dev.arena.peak(), usage.peak) << what;
  EXPECT_EQ(dev.arena.capacity(), usage.peak) << what;
  EXPECT_EQ(dev.arena.peak_by_kind(), usage.by_kind) << what;
  EXPECT_EQ(dev.flops(), usage.flops) << what;
  std::size_t sum = 0;
  for (std::size_t bytes : usage.by_kind) sum += bytes;
  EXPECT_EQ(sum, usage.peak) << what;
}

TEST(Plan, MatchesThePeakOfTheArenaToTheByte) {
  for (const Family& family : walked_families()) {
    for (Index rows : sized<Lengths>({1, 600, 769}, {300})) {
      for (Mode mode : kModes) {
        for (Index micro_batches : sized<Lengths>({1, 2}, {2})) {
          const OptimizerKind kind = micro_batches == 1 ? OptimizerKind::none : OptimizerKind::adamw;
          const Schedule schedule = schedule_for(mode, family.config, rows, kTile);
          const std::string what =
              family.name + ", " + std::to_string(rows) + " rows, " + name(mode) + ", " + std::to_string(micro_batches);
          expect_plan_is_the_arena<float>(family.config, rows, schedule, kind, micro_batches, what);
          if (rows != sized<Index>(600, 300)) continue;
          expect_plan_is_the_arena<BFloat16>(family.config, rows, schedule, kind, micro_batches, what);
          expect_plan_is_the_arena<double>(family.config, rows, schedule, kind, micro_batches, what);
        }
      }
    }
  }
}

TEST(Plan, EstimatesTheFlopsOfAStep) {
  for (const Family& family : walked_families()) {
    const Config& c = family.config;
    const std::vector<Batch> batches = {packed(c, {700}), packed(c, {100, 300, 50}), packed(c, {30, 400, 220})};
    const Schedule schedule = schedule_for(Mode::stream, c, 700, kTile);
    const StepSettings settings{c, DType::f32, OptimizerKind::adamw, 3};
    Cpu dev(plan(settings, 700, schedule).peak);
    Trainer<Cpu, float> trainer(dev, c, 700, OptimizerKind::adamw);
    trainer.initialise(1, 0.1);
    trainer.step(batches, schedule, OptimizerSettings{}, 1);
    EXPECT_NEAR(step_flops(settings, batches, schedule) / dev.flops(), 1, 0.05)
        << family.name;  // windows are estimated
  }
}

TEST(StepProgress, ShowsWhatIsDone) {
  Plan dev;
  const auto shown = [&](StepProgress::Pace pace, double flops) {
    testing::internal::CaptureStdout();
    const StepProgress progress(
        dev, "step 1/2", [] { return 100.0; }, pace);
    dev.reset_work();
    dev.operation("product", flops, 0);
    return testing::internal::GetCapturedStdout();
  };
  EXPECT_TRUE(shown({0, 0}, 25).starts_with("step 1/2: 25% done, about "));
  EXPECT_TRUE(shown({0, 0}, 500).starts_with("step 1/2: 99% done, about "));  // more than estimated
  EXPECT_EQ(shown({0, 0}, 0.5), "step 1/2: 0% done\n");
  EXPECT_EQ(shown({1e9, 0}, 25), "");
  EXPECT_FALSE(dev.on_work);
}

// With 2048 rows, the products of a narrow model have fewer blocks than a GPU runs at once.
TEST(Plan, DefaultChunksFillAGpu) {
  StepSettings s{known_models().at("qwen3-8b")};
  s.device = DeviceKind::cuda, s.tile = kGpuTile;
  EXPECT_EQ(default_chunk(s), 2048);
  s.config.hidden = 1536;
  EXPECT_EQ(default_chunk(s), 4096);
  s.config.hidden = 768;
  EXPECT_EQ(default_chunk(s), 8192);
  s.device = DeviceKind::cpu, s.tile = kTile;
  EXPECT_EQ(default_chunk(s), 512);
}

TEST(Plan, KnowsEveryOptimizer) {
  const Config c = families()[2].config;
  const Schedule schedule = schedule_for(Mode::stream, c, 300, kTile);
  for (const auto& [name, kind] : kOptimizers) {
    expect_plan_is_the_arena<float>(c, 300, schedule, kind, 1, name);
    expect_plan_is_the_arena<BFloat16>(c, 300, schedule, kind, 2, name);
  }
}

// All later micro-batches are like the second, so a thousand take no longer to plan.
TEST(Plan, ManyMicroBatchesNeedTheMemoryOfTwo) {
  StepSettings s{known_models().at("gpt2"), DType::f32, OptimizerKind::adamw, 1};
  const Schedule schedule = schedule_for(Mode::stream, s.config, 1000, 256);
  auto with = [&](Index micro_batches) {
    s.micro_batches = micro_batches;
    return plan(s, 1000, schedule);
  };
  const Usage two = with(2), three = with(3), four = with(4), many = with(Index{1} << 40);
  EXPECT_EQ(three.peak, two.peak);
  EXPECT_EQ(many.by_kind, two.by_kind);
  EXPECT_NEAR(four.flops - three.flops, three.flops - two.flops, 1e-9 * two.flops);
}

TEST(Plan, ChunkAndLengthAreTheLargestThatFit) {
  StepSettings s{known_models().at("qwen3-0.6b"), DType::bf16, OptimizerKind::none, 1};
  const std::size_t budget = std::size_t{5} << 30;
  const Index chunk = chunk_for_budget(s, 40000, budget);
  auto peak = [&](Mode mode, Index rows, Index c) { return plan(s, rows, schedule_for(mode, s.config, rows, c)).peak; };
  ASSERT_GT(chunk, 0);
  EXPECT_LE(peak(Mode::stream, 40000, chunk), budget);
  EXPECT_GT(peak(Mode::stream, 40000, chunk + kTile), budget);
  for (Mode mode : kModes) {
    const Index rows = longest_for_budget(s, mode, 1024, budget);
    EXPECT_LE(peak(mode, rows, 1024), budget);
    EXPECT_GT(peak(mode, rows + kTile, 1024), budget);
  }
  EXPECT_EQ(chunk_for_budget(s, 40000, 1 << 20), 0);
  EXPECT_EQ(longest_for_budget(s, Mode::full, 1024, 1 << 20), 0);
}

TEST(Plan, LargestFindsTheLimit) {
  for (Index edge : {0, 1, 2, 3, 7, 8, 99, 100}) {
    EXPECT_EQ(largest(100, [&](Index n) { return n <= edge; }), edge);
  }
  EXPECT_EQ(largest(100, [](Index) { return true; }), 100);
}

// The advertised lengths for 80 GiB.
TEST(Plan, LongSequencesFitIn80GiB) {
  const std::size_t budget = std::size_t{80} << 30;
  auto longest = [&](const char* model, OptimizerKind kind, Index micro_batches) {
    StepSettings s{known_models().at(model), DType::bf16, kind, micro_batches};
    s.device = DeviceKind::cuda;
    return longest_for_budget(s, Mode::stream, 1024, budget);
  };
  EXPECT_GE(longest("qwen3-8b", OptimizerKind::none, 2), 150000);  // the whole gradient resident
  EXPECT_GE(longest("qwen3-4b", OptimizerKind::adamw_bf16, 1), 260000);
  EXPECT_GE(longest("qwen3-8b", OptimizerKind::adamw_bf16, 1), 90000);
}

// With one micro-batch, the gradient reuses the memory of saved layer inputs, so the peak is less than their sum.
TEST(Plan, SavedInputsAndGradientShareOneBlock) {
  const StepSettings one{known_models().at("qwen3-8b"), DType::bf16, OptimizerKind::none, 1};
  StepSettings two = one;
  two.micro_batches = 2;
  const Index rows = 60000;
  const Schedule schedule = schedule_for(Mode::stream, one.config, rows, 1024);
  EXPECT_LT(plan(one, rows, schedule).peak + (std::size_t{12} << 30), plan(two, rows, schedule).peak);
}

// Per token and in bf16, for streams so long that layers and not the head set the peak: saved layer inputs, the running
// gradient, K, V, and float32 dK, dV; nothing else grows with the length.
TEST(Plan, BytesPerTokenMatchTheFormula) {
  const Config c = known_models().at("qwen3-8b");
  const StepSettings s{c, DType::bf16, OptimizerKind::none, 2};
  auto peak = [&](Index rows) {
    return static_cast<double>(plan(s, rows, schedule_for(Mode::stream, c, rows, 1024)).peak);
  };
  const double per_token = (peak(1 << 19) - peak(1 << 18)) / (1 << 18);
  const double expected = 2.0 * static_cast<double>(c.layers * c.hidden + c.hidden) +
                          2.0 * 2 * static_cast<double>(c.kv_width()) + 2.0 * 4 * static_cast<double>(c.kv_width());
  // and eight numbers: token, target, position, key_begin, weight, logp, its place by token and by position
  EXPECT_NEAR(per_token, expected + 8 * 4, 1);
}

TEST(Plan, ParameterCountsMatchPublishedModels) {
  const std::map<std::string, double> published = {
      {"gpt2", 124.44e6},          {"gpt2-xl", 1557.6e6},         {"llama-3.2-1b", 1235.8e6},
      {"llama-3.2-3b", 3212.7e6},  {"llama-3.1-8b", 8030.3e6},    {"qwen2.5-0.5b", 494.0e6},
      {"qwen2.5-1.5b", 1543.7e6},  {"qwen2.5-3b", 3085.9e6},      {"qwen2.5-7b", 7615.6e6},
      {"qwen3-0.6b", 596.0e6},     {"qwen3-1.7b", 1720.6e6},      {"qwen3-4b", 4022.5e6},
      {"qwen3-8b", 8190.7e6},      {"qwen3-14b", 14768.3e6},      {"qwen3-32b", 32762.1e6},
      {"llama-2-7b", 6738.4e6},    {"mistral-7b-v0.1", 7241.7e6}, {"smollm2-135m", 134.5e6},
      {"smollm2-1.7b", 1711.4e6},  {"tinyllama-1.1b", 1100.0e6},  {"gemma-3-270m", 268.1e6},
      {"gemma-3-1b", 999.9e6},     {"smollm3-3b", 3075.1e6},      {"starcoder2-3b", 3030.4e6},
      {"starcoder2-7b", 7174.0e6}, {"gemma-2b", 2506.2e6},        {"gemma-7b", 8537.7e6},
      {"phi-3-mini-4k", 3821.1e6}, {"phi-4", 14659.5e6},          {"olmo-2-7b", 7298.6e6},
      {"glm-4-9b", 9400.0e6},      {"granite-3.3-2b", 2533.5e6},  {"granite-3.3-8b", 8170.8e6},
      {"command-r", 34980.8e6},    {"aya-expanse-8b", 8028.0e6},  {"exaone-4.0-1.2b", 1279.4e6},
      {"ernie-4.5-0.3b", 360.7e6}, {"seed-oss-36b", 36151.1e6}};
  for (const auto& [model, count] : published) {
    EXPECT_NEAR(static_cast<double>(parameter_count(known_models().at(model))), count, 0.1e6) << model;
  }
}

// --- configurations ---

TEST(ConfigFile, KnownModelsSurviveTheRoundTrip) {
  for (const auto& [model, config] : known_models()) {
    const Config back = config_from_json(config_to_json(config), model);
    EXPECT_EQ(config_to_json(back), config_to_json(config)) << model;
    EXPECT_EQ(parameter_count(back), parameter_count(config)) << model;
  }
}

TEST(ConfigFile, MistralWithAndWithoutWindow) {
  Config c = make_config("mistral", {100, 32, 2, 4, 2, 8, 64, 128, false});
  for (Index window : {0, 7, 4096}) {
    c.window = window;
    EXPECT_EQ(config_from_json(config_to_json(c), "config.json").window, window);
  }
  Json json = config_to_json(c);
  json.erase("sliding_window");
  EXPECT_EQ(config_from_json(json, "config.json").window, 4096);  // the default of transformers
}

Json small_llama() {
  return {{"model_type", "llama"},    {"vocab_size", 100},        {"hidden_size", 32},       {"num_hidden_layers", 2},
          {"num_attention_heads", 4}, {"num_key_value_heads", 2}, {"intermediate_size", 64}, {"rms_norm_eps", 1e-5}};
}

std::string refusal(const Json& json) {
  return error_of([&] { config_from_json(json, "config.json"); });
}

// config.json of published models, one of each form. The counts are those that their pages state.
TEST(ConfigFile, PublishedOnesAreRead) {
  const std::map<std::string, Index> counts = {{"01-ai/Yi-34B", 34'388'917'248},
                                               {"HuggingFaceTB/SmolLM3-3B", 3'075'098'624},
                                               {"LGAI-EXAONE/EXAONE-4.0-32B", 32'003'216'384},
                                               {"Qwen/Qwen2.5-VL-3B-Instruct", 3'085'938'688},
                                               {"Qwen/Qwen3-VL-8B-Instruct", 8'190'735'360},
                                               {"allenai/OLMo-2-1124-7B-Instruct", 7'298'617'344},
                                               {"google/gemma-7b", 8'537'680'896},
                                               {"ibm-granite/granite-3.3-8b-instruct", 8'170'864'640},
                                               {"llava-hf/llava-1.5-7b-hf", 6'738'939'904},
                                               {"meta-llama/Llama-3.1-70B-Instruct", 70'553'706'496},
                                               {"microsoft/Phi-4-mini-instruct", 3'836'021'760},
                                               {"microsoft/phi-4", 14'659'507'200},
                                               {"mistralai/Mistral-Nemo-Instruct-2407", 12'247'782'400},
                                               {"mistralai/Mistral-Small-3.2-24B", 23'572'403'200},
                                               {"tiiuae/Falcon3-7B-Instruct", 7'455'550'464}};
  const Json all = parse_json_file(fs::path(STREAMBP_SOURCE) / "tests/golden/published_configs.json");
  EXPECT_GE(all.size(), 47u);
  for (const auto& [model, json] : all.items()) {
    const Index count = parameter_count(config_from_json(json, model));
    EXPECT_EQ(count, counts.contains(model) ? counts.at(model) : count) << model;
  }
}

// What transformers does where a field is missing or unusual.
TEST(ConfigFile, LayersWithoutRopeOrWindows) {
  const auto read = [](const char* family, const Json& patch) {
    Json json = config_to_json(make_config(family, {100, 32, 4, 4, 2, 8, 64, 128, true}));
    json.update(patch);
    return config_from_json(json, "config.json");
  };
  const Json global = {{"sliding_window", nullptr}, {"layer_types", std::vector<std::string>(4, "full_attention")}};
  EXPECT_FALSE(read("cohere2", global).has_rope(0));
  EXPECT_TRUE(read("exaone4", global).has_rope(0));
  for (const char* family : {"cohere2", "exaone4"}) {
    EXPECT_TRUE(read(family, Json::object()).has_rope(0));
    EXPECT_FALSE(read(family, Json::object()).has_rope(3));
  }
  EXPECT_EQ(read("exaone4", {{"layer_types", nullptr}, {"sliding_window_pattern", "LG"}}).local,
            std::vector<bool>({true, false, true, false}));
  EXPECT_ERROR(read("exaone4", {{"layer_types", nullptr}, {"sliding_window_pattern", "XG"}}), "LLLG");
  const Json mixed = {{"layer_types", {"full_attention", "sliding_attention", "full_attention", "full_attention"}}};
  EXPECT_TRUE(read("ministral", mixed).is_local(1) && !read("ministral", mixed).is_local(2));
  EXPECT_ERROR(read("mistral", mixed), "have the window");
  EXPECT_ERROR(read("granitemoehybrid", {{"position_embedding_type", nullptr}}), "position_embedding_type");
  EXPECT_ERROR(read("granitemoehybrid", {{"layer_types", std::vector<std::string>(4, "linear_attention")}}),
               "linear_attention");
  EXPECT_ERROR(read("granite", {{"attention_multiplier", 0}}), "attention_multiplier");
  EXPECT_ERROR(read("granite", {{"logits_scaling", 1e-310}}), "finite");
}

TEST(ConfigFile, LocalLayersByNameAndByRule) {
  Json json = config_to_json(make_config("gemma3", {100, 32, 13, 4, 2, 8, 64, 128, true}));
  json.erase("layer_types");  // every sixth is global
  std::vector<bool> local(13, true);
  local[5] = local[11] = false;
  EXPECT_EQ(config_from_json(json, "config.json").local, local);
  json["sliding_window_pattern"] = 2;
  EXPECT_FALSE(config_from_json(json, "config.json").is_local(1));
  Json qwen = config_to_json(make_config("qwen2", {100, 32, 3, 4, 2, 8, 64, 128, true}));
  qwen.update({{"sliding_window", 64}, {"max_window_layers", 1}});
  EXPECT_FALSE(config_from_json(qwen, "config.json").is_local(2));  // unless it is enabled
  qwen["use_sliding_window"] = true;
  EXPECT_EQ(config_from_json(qwen, "config.json").local, (std::vector<bool>{false, true, true}));
}

// Other fields of published files. None of them changes what the model computes.
TEST(ConfigFile, IrrelevantFieldsAreAccepted) {
  Json json = small_llama();
  json.update({{"_name_or_path", "x"},
               {"bos_token_id", 1},
               {"eos_token_id", {1, 2}},
               {"torch_dtype", "bfloat16"},
               {"attention_dropout", 0.1},
               {"transformers_version", "4.51.0"},
               {"use_cache", true},
               {"pretraining_tp", 1},
               {"rope_interleaved", false},
               {"final_logit_softcapping", nullptr},
               {"initializer_range", 0.02}});
  EXPECT_EQ(refusal(json), "");
}

// Dynamic NTK stretches the context of pretraining; Phi-3's form of longrope has that context beside the object.
TEST(ConfigFile, RopeScalingByLength) {
  Json json = small_llama();
  json.update({{"max_position_embeddings", 64}, {"rope_scaling", {{"type", "dynamic"}, {"factor", 2.5}}}});
  Config c = config_from_json(json, "config.json");
  EXPECT_EQ(c.max_length, 160);
  EXPECT_EQ(config_to_json(config_from_json(config_to_json(c), "again")), config_to_json(c));
  const Batch batch = packed(c, {80});
  EXPECT_PRED2(contains, error_of([&] { validate(c, batch); }), "RoPE is scaled for");
  c.rope_scaling.longest = 80;
  EXPECT_NO_THROW(validate(c, batch));

  json.update(
      {{"original_max_position_embeddings", 16},
       {"rope_scaling", {{"type", "longrope"}, {"long_factor", {1, 2, 3, 4}}, {"short_factor", {1, 1, 1, 1.5}}}}});
  json["rope_scaling"]["original_max_position_embeddings"] = 32;  // transformers takes the one beside the object
  c = config_from_json(json, "config.json");
  EXPECT_EQ(c.max_length, 64);
  EXPECT_EQ(c.rope_scaling.original_length, 16);
  EXPECT_NEAR(c.rope_scaling.attention_factor, std::sqrt(1.5), 1e-15);
  EXPECT_EQ(config_to_json(config_from_json(config_to_json(c), "again")), config_to_json(c));
}

TEST(ConfigFile, UnsupportedFieldsAreRefusedByName) {
  EXPECT_EQ(refusal(small_llama()), "");
  const auto longrope = [](const std::map<std::string, Json>& fields) {
    Json scaling = {{"type", "longrope"}, {"long_factor", {1, 2}}, {"short_factor", {1, 2}}};
    for (const auto& [field, value] : fields) scaling[field] = value;
    return Json{{"rope_scaling", scaling}, {"max_position_embeddings", 64}};
  };
  const std::vector<std::pair<Json, const char*>> patches = {
      {{{"model_type", "mixtral"}}, "mixtral"},
      {{{"hidden_act", "gelu"}}, "hidden_act"},
      {{{"rope_scaling", {{"rope_type", "proportional"}, {"factor", 4}}}}, "proportional"},
      {{{"rope_scaling", {{"type", "linear"}, {"factor", 4}}}, {"rope_parameters", {{"rope_theta", 1e4}}}},
       "rope_parameters"},
      {{{"rope_scaling", {{"rope_type", "dynamic"}, {"factor", 4}}}}, "max_position_embeddings"},
      {{{"rope_scaling", {{"rope_type", "dynamic"}, {"factor", 0.5}}}, {"max_position_embeddings", 64}}, "at least 1"},
      {{{"rope_scaling", {{"type", "longrope"}, {"long_factor", {1, 2}}, {"short_factor", {1, 2}}}}}, "too short"},
      {{{"rope_scaling", {{"type", "longrope"}, {"long_factor", {1, 2}}}}, {"max_position_embeddings", 64}},
       "short_factor"},
      {longrope({}), "the 4 pairs of a head"},
      {longrope({{"long_factor", {1, "x"}}}), "list of numbers"},
      {longrope({{"long_factor", {1, 0}}}), "positive"},
      {longrope({{"factor", -4}}), "\"factor\" must be positive"},
      {{{"rope_scaling", {{"type", "longrope"}, {"original_max_position_embeddings", 16}}}}, "max_position_embeddings"},
      {{{"rope_scaling", {{"rope_type", "yarn"}, {"factor", 4}}}}, "original_max_position_embeddings"},
      {{{"rope_scaling",
         {{"rope_type", "yarn"}, {"factor", 4}, {"original_max_position_embeddings", 64}, {"beta_fast", 1}}}},
       "beta_fast"},
      {{{"rope_scaling", {{"rope_type", "llama3"}, {"factor", 8}}}}, "original_max_position_embeddings"},
      {{{"rope_scaling", {{"rope_type", "llama3"}, {"factor", 8}, {"original_max_position_embeddings", 64}}}},
       "low_freq_factor"},
      {{{"num_key_value_heads", 3}}, "3 key/value heads"},
      {{{"num_attention_heads", 5}}, "num_attention_heads"},
      {{{"hidden_size", "wide"}}, "hidden_size"},
      {{{"hidden_size", -32}}, "\"hidden_size\" is -32"},
      {{{"vocab_size", nullptr}}, "vocab_size"},
      {{{"head_dim", 7}}, "even"},
      {{{"num_hidden_layers", 0}}, "positive"},
      {{{"num_hidden_layers", 4097}}, "4097 layers"},
      {{{"model_type", "gpt2"}, {"n_embd", -4611686018427387904}, {"n_layer", 2}, {"n_head", 2}}, "n_embd"},
      {{{"hidden_size", 4000000000}, {"head_dim", 64}}, "4000000000"},
      {{{"intermediate_size", 4611686018427387904}}, "supported"},
      {{{"rms_norm_eps", 0}}, "epsilon"},
      {{{"layer_types", {"full_attention"}}, {"model_type", "mistral"}}, "each of the 2 layers"},
      {{{"layer_types", {"full_attention", "linear_attention"}}, {"model_type", "mistral"}}, "linear_attention"},
      {{{"architectures", {"LlamaForSequenceClassification"}}}, "LlamaForSequenceClassification"},
      {{{"final_logit_softcapping", 30.0}}, "final_logit_softcapping"},
      {{{"residual_multiplier", 0.22}}, "residual_multiplier"},
      {{{"quantization_config", {{"bits", 4}}}}, "quantization_config"},
      {{{"rope_scaling", {{"rope_type", "linear"}, {"factor", 2}, {"beta_fast", 32}}}}, "beta_fast"},
      {{{"rope_parameters", {{"rope_theta", 1e4}, {"partial_rotary_factor", 0.5}}}}, "partial_rotary_factor"},
      {{{"sliding_window", 128}}, "sliding_window"},
      {{{"model_type", "gemma3"}}, "text_config"},
      {{{"model_type", "gemma3_text"}, {"hidden_act", "gelu_pytorch_tanh"}, {"sliding_window", 0}}, "sliding_window"},
      {{{"partial_rotary_factor", 0.5}}, "partial_rotary_factor"},
  };
  for (const auto& [patch, named] : patches) {
    Json json = small_llama();
    json.update(patch);
    EXPECT_PRED2(contains, refusal(json), named) << patch << ": ";
  }
  EXPECT_PRED2(contains, refusal(Json::array()), "object");
}

}  // namespace
}  // namespace streambp
