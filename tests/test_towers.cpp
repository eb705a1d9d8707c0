// Multimodal models: the text model is found, trained and saved, and everything else stays as it is.
#include "data/files/adapters.h"
#include "tests/golden.h"

namespace streambp {
namespace {

const char* const kVision = R"({"hidden_size": 8, "model_type": "siglip_vision_model"})";

// The tensors of a file: type, shape and bytes by name.
using Stored = std::map<std::string, std::tuple<std::string, std::vector<Index>, std::string>>;
Stored stored(const fs::path& dir) {
  Stored all;
  const ModelFiles files(dir);
  for (const auto& [name, tensor] : files.all())
    all[name] = {tensor->dtype, tensor->shape, std::string(reinterpret_cast<const char*>(tensor->data), tensor->bytes)};
  return all;
}

// A golden model as the text model of a multimodal one. `root`: of its tensors' names. Norms stay in float32, the other
// weights become bfloat16.
void write_tower(const Golden& golden, const fs::path& dir, const std::string& root, const std::string& head) {
  const Json text = Json::parse(golden.file.metadata().at("config"));
  const Tower& tower = *tower_of(golden.config.family);
  const Json config = {{"model_type", tower.type}, {"architectures", {tower.architecture}},
                       {"text_config", text},      {"vision_config", Json::parse(kVision)},
                       {"image_token_index", 3},   {"mm_tokens_per_image", 256}};
  write_file_atomically(dir / "config.json", config.dump(1));
  write_file_atomically(dir / "preprocessor_config.json", R"({"do_resize":  true})");
  std::list<std::vector<BFloat16>> narrow;
  SafetensorsWriter writer(dir / "model.safetensors", {{"format", "pt"}});
  for (const auto& [name, tensor] : golden.file.tensors()) {
    if (!name.starts_with("weights/")) continue;
    std::string stored_name = name.substr(8);
    stored_name = stored_name.starts_with("model.") ? root + stored_name.substr(6) : head + ".weight";
    if (tensor.shape.size() == 1) {
      writer.add(stored_name, "F32", tensor.shape, tensor.data, tensor.bytes);
      continue;
    }
    std::vector<BFloat16>& numbers = narrow.emplace_back();
    for (const float x : streambp::numbers<float>(tensor)) numbers.push_back(BFloat16(x));
    writer.add(stored_name, "BF16", tensor.shape, numbers.data(), 2 * numbers.size());
  }
  static const std::vector<float> vision(24, 0.3f);
  writer.add("vision_tower.encoder.layers.0.weight", "F32", {4, 6}, vision.data(), 96);
  writer.add("multi_modal_projector.norm.weight", "F16", {48}, vision.data(), 96);
  writer.add("mtp.embed_tokens.weight", "F32", {4, 6}, vision.data(), 96);
  writer.add("vision_tower.mask", "BOOL", {96}, vision.data(), 96);
  writer.finish();
}

class Towers : public TemporaryDirectory {};

TEST_F(Towers, AreSavedAsTheyWereLoaded) {
  for (const char* name : {"gemma3", "gemma3_scaled", "qwen3_5", "qwen3_5_wide"}) {  // tied and untied
    for (const auto& [root, head] : {std::pair("language_model.model.", "language_model.lm_head"),
                                     std::pair("model.language_model.", "lm_head")}) {
      const Golden golden(name);
      write_tower(golden, dir, root, head);
      Config c = read_config(dir);
      EXPECT_EQ(ModelFiles(dir, c.root).names().text, root);
      EXPECT_EQ(c.root, "model.language_model.");
      EXPECT_EQ(c.family, golden.config.family);
      EXPECT_EQ(parameter_count(c), parameter_count(golden.config));
      Cpu dev(std::size_t{1} << 22);
      Model<float> model{c, Tensors<float>(c)};
      allocate_weights(dev, model);
      load_model(dev, dir, model);
      const ModelLayout layout(dir);
      for (const std::size_t limit : {kLargestShard, std::size_t{20'000}}) {
        const fs::path saved = dir / "saved";
        fs::create_directory(saved);
        save_model(dev, saved, model, layout, {.limit = limit});
        EXPECT_TRUE(stored(saved) == stored(dir)) << name << ", " << root;
        EXPECT_EQ(read_file(saved / "config.json"), read_file(dir / "config.json"));
        EXPECT_EQ(read_file(saved / "preprocessor_config.json"), read_file(dir / "preprocessor_config.json"));
        fs::remove_all(saved);
      }
      if (c.tied) continue;
      c.adapters = new_adapters(c, {2, 4, false, {"all"}});
      c.trained = {"lm_head.weight", "model.language_model.layers.1.input_layernorm.weight"};
      Model<float> adapted{c, Tensors<float>(c)};
      Cpu other(std::size_t{1} << 22);
      allocate_weights(other, adapted);
      initialise(other, adapted, 1);
      save_adapters(other, dir, c, trained(table(c, adapted.weights)), adapter_config(c, {2, 4}, "base"));
      const SafetensorsFile file(dir / "adapter_model.safetensors");
      // PEFT's names are those of the modules, not of the files.
      for (const char* name : {"model.language_model.layers.1.self_attn.q_proj.lora_A.weight", "lm_head.weight",
                               "model.language_model.layers.1.input_layernorm.weight"})
        EXPECT_TRUE(file.find("base_model.model." + std::string(name))) << name;
      const Json targets = parse_json_file(dir / "adapter_config.json").at("target_modules");
      EXPECT_EQ(targets.get<std::string>().find("model\\.language_model\\.(.*\\.)?("), 0u) << targets;
      Config read = read_config(dir);
      AdapterDirectory(dir).add_to(read);
      EXPECT_EQ(read.adapters.size(), c.adapters.size());
    }
  }
}

TEST_F(Towers, WithTypesThatCannotBeSavedAreRefused) {
  const Golden golden("gemma3");
  write_tower(golden, dir, "language_model.", "lm_head");
  SafetensorsWriter writer(dir / "other.safetensors", {{"format", "pt"}});
  const SafetensorsFile file(dir / "model.safetensors");
  for (const auto& [name, tensor] : file.tensors())
    writer.add(name, tensor.dtype, tensor.shape, tensor.data, tensor.bytes);
  const float x[2] = {};
  writer.add("vision_tower.waves", "F32", {2}, x, 8);
  writer.finish();
  std::string bytes = read_file(dir / "other.safetensors");
  const std::size_t at = bytes.find("\"vision_tower.waves\"");
  const std::size_t type = bytes.find("F32", at), shape = bytes.find("[2]", at);
  bytes.replace(type, 3, "C64"), bytes.replace(shape, 3, "[1]");
  write_file_atomically(dir / "model.safetensors", bytes);
  EXPECT_ERROR(ModelLayout(dir).require_writable(read_config(dir)),
               "\"vision_tower.waves\": has the type C64, which cannot be saved");
}

TEST_F(Towers, AreFoundByTheirTokens) {
  const Golden golden("gemma3_scaled");
  write_tower(golden, dir, "language_model.", "lm_head");
  EXPECT_EQ(ModelFiles(dir, read_config(dir).root).names().text, "language_model.");
  write_tower(golden, dir, "model.text.embed_tokens.weight.", "lm_head");
  EXPECT_EQ(ModelFiles(dir, read_config(dir).root).names().text, "model.text.embed_tokens.weight.");
  EXPECT_FALSE(read_config(dir).tied);
  const float x = 1;
  const auto write = [&](const std::vector<const char*>& names) {
    SafetensorsWriter writer(dir / "model.safetensors", {{"format", "pt"}});
    for (const char* name : names) writer.add(name, "F32", {1, 1}, &x, 4);
    writer.finish();
  };
  write({"a.embed_tokens.weight"});
  EXPECT_FALSE(read_config(dir).tied);  // the head is lost
  Json config = parse_json_file(dir / "config.json");
  for (Json* fields : {&config, &config["text_config"]}) fields->erase("tie_word_embeddings");
  config["text_config"]["model_type"] = "qwen3";  // not tied by default
  for (const char* field : {"layer_types", "final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar",
                            "use_bidirectional_attention", "hidden_activation", "sliding_window", "rope_parameters"})
    config["text_config"].erase(field);
  write_file_atomically(dir / "config.json", config.dump());
  EXPECT_TRUE(read_config(dir).tied);  // there is no head
  write({"a.embed_tokens.weight", "b.embed_tokens.weight"});
  EXPECT_ERROR(read_config(dir), "several embed_tokens.weight");
  write({"a.embed_tokens.weight", "lm_head.weight", "talker.lm_head.weight"});
  EXPECT_ERROR(read_config(dir), "several lm_head.weight");
  write({"a.weight"});
  EXPECT_ERROR(read_config(dir), "no tensor's name ends with");
}

TEST(TowerConfig, IsReadInAllItsForms) {
  const Json flat = parse_json_file(fs::path(STREAMBP_SOURCE) / "tests/golden/published_configs.json")
                        .at("Qwen/Qwen2.5-VL-3B-Instruct");
  Json text = {{"model_type", "qwen2_5_vl_text"}};
  for (const char* field : {"hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers",
                            "num_key_value_heads", "rms_norm_eps", "rope_theta", "vocab_size", "max_window_layers",
                            "use_sliding_window", "sliding_window", "rope_scaling"})
    text[field] = flat.at(field);
  const Json nested = {{"model_type", "qwen2_5_vl"},  {"architectures", {"Qwen2_5_VLForConditionalGeneration"}},
                       {"tie_word_embeddings", true}, {"image_token_id", 151655},
                       {"text_config", text},         {"vision_config", Json::parse(kVision)}};
  for (const Json& json : {flat, nested}) {
    const Config c = config_from_json(json, "config.json");
    EXPECT_EQ(c.family, "qwen2");
    EXPECT_TRUE(c.tied && c.qkv_bias);
    EXPECT_EQ(parameter_count(c), parameter_count(known_models().at("qwen2.5-3b")));
    EXPECT_FALSE(c.root.empty());
  }
  // Qwen3.5-27B, as a multimodal model and as a text model alone.
  Json qwen3_5 = {{"model_type", "qwen3_5_text"},
                  {"attn_output_gate", true},
                  {"full_attention_interval", 4},
                  {"head_dim", 256},
                  {"hidden_size", 5120},
                  {"intermediate_size", 17408},
                  {"linear_num_value_heads", 48},
                  {"mamba_ssm_dtype", "float32"},
                  {"mlp_only_layers", Json::array()},
                  {"mtp_num_hidden_layers", 1},
                  {"mtp_use_dedicated_embeddings", false},
                  {"num_attention_heads", 24},
                  {"num_hidden_layers", 64},
                  {"num_key_value_heads", 4},
                  {"output_gate_type", "swish"},
                  {"rope_parameters",
                   {{"mrope_interleaved", true},
                    {"mrope_section", {11, 11, 10}},
                    {"partial_rotary_factor", 0.25},
                    {"rope_theta", 10000000},
                    {"rope_type", "default"}}}};
  Json whole = {{"model_type", "qwen3_5"},
                {"architectures", {"Qwen3_5ForConditionalGeneration"}},
                {"text_config", qwen3_5},
                {"language_model_only", false},
                {"vision_config", {{"model_type", "qwen3_5"}, {"depth", 27}}}};
  for (const Json& json : {whole, qwen3_5}) {
    const Config c = config_from_json(json, "config.json");
    EXPECT_EQ(parameter_count(c), 26'895'998'464);
    EXPECT_EQ(c.root, json == whole ? "model.language_model." : "");
    EXPECT_EQ(c.rope_theta, 1e7);
  }

  const auto changed = [&](const Json& patch) {
    Json json = nested;
    json.merge_patch(patch);
    return config_from_json(json, "config.json");
  };
  EXPECT_ERROR(changed({{"text_config", {{"rope_scaling", {{"type", "magic"}}}}}}), "magic");
  EXPECT_ERROR(changed({{"text_config", {{"model_type", "mamba"}}}}), "mamba");
  EXPECT_ERROR(changed({{"text_config", {{"model_type", "gemma3"}}}}), "cannot be of type");
  EXPECT_ERROR(changed({{"text_config", 3}}), "text_config");
  EXPECT_ERROR(changed({{"architectures", {"Qwen2_5_VLModel"}}}), "Qwen2_5_VLModel");
  EXPECT_FALSE(changed({{"tie_word_embeddings", false}}).tied);
  EXPECT_TRUE(changed({{"tie_word_embeddings", false}, {"text_config", {{"tie_word_embeddings", true}}}}).tied);
  const Config usual = changed({{"text_config", {{"rms_norm_eps", nullptr}, {"rope_theta", nullptr}}}});
  EXPECT_EQ(usual.norm_eps, 1e-5);  // not Qwen2's
  EXPECT_EQ(usual.rope_theta, 1e6);
}

}  // namespace
}  // namespace streambp
