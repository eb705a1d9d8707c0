// config.json: what is read, written, accepted and refused.
#include "data/files/checkpoint.h"
#include "tests/support.cuh"

namespace streambp {
namespace {

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
                                               {"google/gemma-2-27b", 27'227'128'320},
                                               {"google/gemma-2-2b", 2'614'341'888},
                                               {"google/gemma-2-9b", 9'241'705'984},
                                               {"google/gemma-7b", 8'537'680'896},
                                               {"ibm-granite/granite-3.3-8b-instruct", 8'170'864'640},
                                               {"llava-hf/llava-1.5-7b-hf", 6'738'939'904},
                                               {"karpathy/nanochat-d32", 1'879'048'192},
                                               {"meta-llama/Llama-3.1-70B-Instruct", 70'553'706'496},
                                               {"microsoft/Phi-4-mini-instruct", 3'836'021'760},
                                               {"microsoft/phi-4", 14'659'507'200},
                                               {"mistralai/Mistral-Nemo-Instruct-2407", 12'247'782'400},
                                               {"mistralai/Mistral-Small-3.2-24B", 23'572'403'200},
                                               {"openai/gpt-oss-20b", 20'914'757'184},
                                               {"tiiuae/Falcon3-7B-Instruct", 7'455'550'464}};
  const Json all = parse_json_file(fs::path(STREAMBP_SOURCE) / "tests/golden/published_configs.json");
  EXPECT_GE(all.size(), 52u);
  for (const auto& [model, json] : all.items()) {
    const Index count = parameter_count(config_from_json(json, model));
    EXPECT_EQ(count, counts.contains(model) ? counts.at(model) : count) << model;
  }
}

TEST(ConfigFile, OfANewModelIsReadBack) {
  for (const ModelFamily& family : model_families()) {
    const Json json = config_to_json(make_config(family.name, {100, 32, 4, 4, 4, 8, 64, 128, true}));
    EXPECT_EQ(config_to_json(config_from_json(json, family.name)), json) << family.name;
  }
}

// Null is no cap; without the field there is one.
TEST(ConfigFile, SoftCapsMayBeNull) {
  Json json = config_to_json(make_config("gemma2", {100, 32, 4, 4, 2, 8, 64, 128, true}));
  EXPECT_EQ(json.at("attn_logit_softcapping"), 50);
  EXPECT_TRUE(json.at("query_pre_attn_scalar").is_number_integer());
  json["attn_logit_softcapping"] = nullptr, json.erase("final_logit_softcapping");
  const Config c = config_from_json(json, "config.json");
  EXPECT_EQ(c.score_cap, 0);
  EXPECT_EQ(c.logit_cap, 30);
  EXPECT_EQ(config_to_json(c).at("attn_logit_softcapping"), Json());
  EXPECT_TRUE(c.is_local(0) && !c.is_local(1));
}

// Every field of transformers' configuration classes, with its default value (scripts/make_default_configs.py).
TEST(ConfigFile, DefaultsOfTransformersAreRead) {
  const Json all = parse_json_file(fs::path(STREAMBP_SOURCE) / "tests/golden/default_configs.json");
  EXPECT_EQ(all.size(), model_families().size());
  for (const Json& model : all) {
    const Json& json = model.at("config");
    const Config c = config_from_json(json, json.at("model_type"));
    EXPECT_EQ(trained_count(c), model.at("parameters"))  // without buffers
        << json.at("model_type");
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
  Json with_window = global;
  with_window["sliding_window"] = 16;
  EXPECT_FALSE(read("exaone4", with_window).has_rope(0));
  EXPECT_ERROR(read("starcoder2", with_window), "all layers of starcoder2 models have the window");
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

TEST(ConfigFile, ThetaOfEachLayer) {
  Config c = make_config("granite_swa", {100, 32, 5, 4, 2, 8, 64, 128, true});
  EXPECT_EQ(c.local, (std::vector<bool>{false, true, true, true, false}));
  EXPECT_EQ(config_from_json(config_to_json(c), "f"), c);
  c.rope_theta = 100, c.without_rope = {true, false, false, true, true};
  Json json = config_to_json(c);
  EXPECT_EQ(json["layer_rope_theta"], Json({0, 100.0, 100.0, 0, 0}));
  json.erase("layer_types");  // the first of every four is global
  EXPECT_EQ(config_from_json(json, "f"), c);
  json["layer_rope_theta"] = {50, 100, 100, 100, 50};
  c.rope_theta = 50, c.local_rope_theta = 100, c.without_rope.clear();
  EXPECT_EQ(config_from_json(json, "f"), c);
  json["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 2}};
  EXPECT_ERROR(config_from_json(json, "f"), "with one theta only");
  json["layer_rope_theta"] = {50, 100, 101, 100, 50};
  EXPECT_ERROR(config_from_json(json, "f"), "layer 2 has 101");
  json["layer_rope_theta"] = {50, 100, -100, 100, 50};
  EXPECT_ERROR(config_from_json(json, "f"), "layer 2 has -100; it must be 1 or more");
  json["layer_rope_theta"] = {50, 100};
  EXPECT_ERROR(config_from_json(json, "f"), "a number for each of the 5 layers");
}

// What a file leaves out is as in transformers.
TEST(ConfigFile, DefaultsOfGptOss) {
  const Config published = known_models().at("gpt-oss-120b");
  EXPECT_TRUE(published.is_local(0) && !published.is_local(1) && published.is_local(34));
  Json json = {{"model_type", "gpt_oss"}, {"quantization_config", {{"quant_method", "mxfp4"}}}};
  EXPECT_EQ(config_from_json(json, "f"), published);
  json["num_hidden_layers"] = 24, json["num_local_experts"] = 32, json["experts_per_token"] = 4;
  EXPECT_EQ(config_from_json(json, "f"), known_models().at("gpt-oss-20b"));
  EXPECT_EQ(parameter_count(published), 116'829'156'672);
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
  qwen.erase("sliding_window");
  EXPECT_EQ(config_from_json(qwen, "config.json").window, 4096);  // the default of transformers
  Json cohere = config_to_json(make_config("cohere2", {100, 32, 3, 4, 2, 8, 64, 128, true}));
  cohere.erase("rope_theta"), cohere.erase("rope_parameters");
  EXPECT_EQ(config_from_json(cohere, "config.json").rope_theta, 1e4);
}

// Qwen3.5's layers of delta rules.
TEST(ConfigFile, DeltaRulesByNameAndByInterval) {
  Json json = config_to_json(make_config("qwen3_5", {100, 32, 8, 4, 2, 8, 64, 128, true}));
  EXPECT_FALSE(json.contains("block_auto_adjust_ff_dim"));
  const Config c = config_from_json(json, "config.json");
  for (Index l = 0; l < 8; ++l) EXPECT_EQ(c.mixer(l) == MixerKind::attention, l % 4 == 3) << l;
  EXPECT_EQ(c.mlp, 64);
  EXPECT_EQ(c.rotary_share, 0.25);
  Json by_rule = json;
  by_rule.erase("layer_types"), by_rule.erase("partial_rotary_factor");
  EXPECT_EQ(config_from_json(by_rule, "config.json"), c);
  by_rule["full_attention_interval"] = 3;
  for (Index l = 0; l < 8; ++l)
    EXPECT_EQ(config_from_json(by_rule, "config.json").mixer(l) == MixerKind::attention, l % 3 == 2) << l;
  by_rule["full_attention_interval"] = 0;
  EXPECT_PRED2(contains, refusal(by_rule), "\"full_attention_interval\" must be positive");
  json["rope_parameters"] = {{"partial_rotary_factor", 0.5}, {"rope_theta", 100}, {"mrope_section", {1, 1, 0}}};
  EXPECT_EQ(config_from_json(json, "config.json").rotary_share, 0.5);  // and not that beside it
  json["output_gate_type"] = "silu";                                   // the same as "swish"
  EXPECT_EQ(refusal(json), "");
  for (const auto& [field, value] : std::map<std::string, Json>{{"attn_output_gate", false},
                                                                {"output_gate_type", "sigmoid"},
                                                                {"full_attn_idxs", {3}},
                                                                {"linear_num_value_heads", 5}}) {
    Json other = json;
    other[field] = value;
    EXPECT_NE(refusal(other), "") << field;
  }
  json["layer_types"][2] = "conv";
  EXPECT_PRED2(contains, refusal(json), "full_attention, linear_attention are");
}

// OLMo Hybrid has RoPE if the file has a theta, or none at all; a null turns RoPE off.
TEST(ConfigFile, OlmoHybridHasRopeIfThereIsATheta) {
  const Config published = known_models().at("olmo-hybrid-7b");
  Json json = config_to_json(published);
  EXPECT_FALSE(json.contains("no_rope_layers"));
  EXPECT_EQ(config_from_json(json, "config.json"), published);
  const auto rotates = [&](const Json& fields) {
    Json other = json;
    other.erase("rope_theta"), other.erase("rope_parameters");
    other.update(fields);
    const Config c = config_from_json(other, "config.json");
    EXPECT_EQ(config_from_json(config_to_json(c), "again"), c) << fields;
    return c.has_rope(3);
  };
  const Json theta = {{"rope_theta", 500.0}, {"rope_type", "default"}},
             null = {{"rope_theta", nullptr}, {"rope_type", "default"}};
  for (const Json& fields : std::vector<Json>{Json::object(),
                                              {{"rope_theta", 500.0}},
                                              {{"rope_theta", 500.0}, {"rope_parameters", nullptr}},
                                              {{"rope_parameters", nullptr}},  // as transformers has it
                                              {{"rope_theta", nullptr}, {"rope_parameters", theta}},
                                              {{"rope_parameters", theta}}})
    EXPECT_TRUE(rotates(fields)) << fields;
  for (const Json& fields : std::vector<Json>{{{"rope_theta", nullptr}},
                                              {{"rope_theta", nullptr}, {"rope_parameters", nullptr}},
                                              {{"rope_parameters", null}}})
    EXPECT_FALSE(rotates(fields)) << fields;
}

TEST(ConfigFile, OlmoHybridsWidthsFollowFromItsHeads) {
  const Config c = make_config("olmo_hybrid", {100, 40, 3, 4, 4, 10, 64, 128, false});
  Json json = config_to_json(c);
  for (const char* name : {"linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
                           "linear_value_head_dim", "num_key_value_heads", "layer_types", "linear_allow_neg_eigval"})
    json.erase(name);
  EXPECT_EQ(config_from_json(json, "config.json"), c);
  EXPECT_EQ(c.delta_key_dim, 7);  // three quarters of a head, rounded down
  EXPECT_EQ(c.delta_value_dim, 14);
  EXPECT_TRUE(c.doubles_beta);
  EXPECT_EQ(c.mixer(2), MixerKind::attention);  // the last of a few layers
  EXPECT_EQ(c.mixer(1), MixerKind::delta_rule);
  json["linear_num_key_heads"] = 0;
  EXPECT_NE(refusal(json), "");
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
               {"unsloth_fixed_mtp", true},
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

// Positions of images; those of text are plain.
TEST(ConfigFile, RopeWithThreePositionsIsPlain) {
  Json json = small_llama();
  json["rope_parameters"] = {{"rope_theta", 500}, {"rope_type", "default"}};
  const Config plain = config_from_json(json, "config.json");
  json["rope_parameters"].update({{"mrope_section", {11, 11, 10}}, {"mrope_interleaved", true}});
  EXPECT_EQ(config_from_json(json, "config.json"), plain);
  json["rope_parameters"]["rope_type"] = "mrope";
  EXPECT_EQ(config_from_json(json, "config.json"), plain);
  json["rope_parameters"] = {{"rope_theta", 500}, {"rope_type", "mrope"}};
  EXPECT_PRED2(contains, refusal(json), "RoPE scaling of type \"mrope\" is not supported");
}

TEST(ConfigFile, RopeThatRotatesNothingIsRefused) {
  EXPECT_ERROR(validate(make_config("qwen3_5", {13, 8, 2, 2, 1, 2, 12, 0, false})),
               "not 0.25 of 2; choose a larger head-dim");
}

TEST(ConfigFile, UnsupportedFieldsAreRefusedByName) {
  EXPECT_EQ(refusal(small_llama()), "");
  const auto longrope = [](const std::map<std::string, Json>& fields) {
    Json scaling = {{"type", "longrope"}, {"long_factor", {1, 2}}, {"short_factor", {1, 2}}};
    for (const auto& [field, value] : fields) scaling[field] = value;
    return Json{{"rope_scaling", scaling}, {"max_position_embeddings", 64}};
  };
  const std::vector<std::pair<Json, const char*>> patches = {
      {{{"model_type", "unknown"}}, "\"unknown\" are not supported; arcee, aya_vision"},
      {{{"model_type", "deepseek_v3"}}, "latent vectors"},
      {{{"model_type", "gpt_oss"}, {"swiglu_limit", 5}}, "swiglu_limit"},
      {{{"model_type", "mixtral"}, {"num_local_experts", 4}, {"num_experts_per_tok", 5}},
       "cannot choose 5 of 4 experts"},
      {{{"model_type", "qwen3_moe"}, {"mlp_only_layers", {1}}}, "mlp_only_layers"},
      {{{"model_type", "gemma4_text"}}, "per-layer embeddings"},
      {{{"model_type", "gemma4_text"}, {"hidden_size_per_layer_input", 0}, {"enable_moe_block", true}}, "26B-A4B"},
      {{{"model_type", "gemma4_text"}, {"hidden_size_per_layer_input", 0}, {"num_kv_shared_layers", 1}}, "share keys"},
      {{{"model_type", "gemma4_text"},
        {"hidden_size_per_layer_input", 0},
        {"hidden_act", nullptr},
        {"global_head_dim", 0}},
       "global layers"},
      {{{"model_type", "gemma4_text"},
        {"hidden_size_per_layer_input", 0},
        {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 1e4}}}},
       "\"sliding_attention\" are missing"},
      {{{"model_type", "gemma4_unified_text"}}, "gemma4_text's"},
      {{{"model_type", "gemma2"}, {"hidden_act", nullptr}, {"attn_logit_softcapping", -1}}, "positive or null"},
      {{{"model_type", "gemma2"}, {"hidden_act", nullptr}, {"attn_logit_softcapping", 0}}, "positive or null"},
      {{{"model_type", "gemma2"}, {"hidden_act", nullptr}, {"attn_logit_softcapping", 2000}}, "soft caps"},
      {{{"hidden_act", "gelu"}}, "hidden_act"},
      {{{"rope_scaling", {{"rope_type", "spiral"}, {"factor", 4}}}}, "spiral"},
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
      {{{"max_position_embeddings", -1}}, "\"max_position_embeddings\" is -1, but must not be negative"},
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
