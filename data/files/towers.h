// Multimodal models of which the text model is trained: it computes text as if it were alone. Their other parts, such as a
// vision encoder, are neither computed nor changed, and saved bit for bit as they were.
//
// Their config.json holds that of the text model as "text_config", or in older files as its own fields. How the files call
// the text model's tensors depends on the version of transformers (StoredNames in model_files.h).
#pragma once

#include "model/config.h"
#include "text/fields.h"

namespace streambp {

struct Tower {
  const char *type, *architecture;             // in config.json
  const char* text;                            // the usual type of the text model
  const char* usual = "{}";                    // what its configuration may leave out, as transformers fills it in
  const char* root = "model.language_model.";  // of the names of its parameters
  bool flat = false;                           // older files have its fields beside "vision_config"
};
// clang-format off
inline constexpr const char
    *kGemma4Unified = R"({"hidden_size_per_layer_input": 0, "sliding_window": 1024, "use_bidirectional_attention": "vision"})",
    *kQwen2 = R"({"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80})",
    *kLlama = R"({"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
                  "vocab_size": 32000, "max_position_embeddings": 2048})";
inline constexpr Tower kTowers[] = {
    {"gemma3",          "Gemma3ForConditionalGeneration",         "gemma3_text"},
    {"gemma4",          "Gemma4ForConditionalGeneration",         "gemma4_text"},
    {"gemma4_unified",  "Gemma4UnifiedForConditionalGeneration",  "gemma4_text", kGemma4Unified},
    {"mistral3",        "Mistral3ForConditionalGeneration",       "mistral"},
    {"qwen2_vl",        "Qwen2VLForConditionalGeneration",        "qwen2", kQwen2, "model.language_model.", true},
    {"qwen2_5_vl",      "Qwen2_5_VLForConditionalGeneration",     "qwen2", kQwen2, "model.language_model.", true},
    {"qwen3_vl",        "Qwen3VLForConditionalGeneration",        "qwen3", R"({"rope_theta": 5e5})"},
    {"qwen3_5",         "Qwen3_5ForConditionalGeneration",        "qwen3_5_text"},
    {"qwen3_5_moe",     "Qwen3_5MoeForConditionalGeneration",     "qwen3_5_moe_text"},
    {"smolvlm",         "SmolVLMForConditionalGeneration",        "llama", kLlama, "model.text_model."},
    {"idefics3",        "Idefics3ForConditionalGeneration",       "llama", kLlama, "model.text_model."},
    {"internvl",        "InternVLForConditionalGeneration",       "qwen2"},
    {"llava",           "LlavaForConditionalGeneration",          "llama", kLlama},
    {"llava_onevision", "LlavaOnevisionForConditionalGeneration", "qwen2"},
    {"aya_vision",      "AyaVisionForConditionalGeneration",      "cohere2"},
    {"cohere2_vision",  "Cohere2VisionForConditionalGeneration",  "cohere2"}};
// clang-format on

// Null: a text model.
inline const Tower* tower_of(const std::string& type) {
  const auto found = std::ranges::find(kTowers, type, [](const Tower& t) { return std::string(t.type); });
  return found == std::end(kTowers) ? nullptr : found;
}

// The config.json of the text model.
inline Json text_config(const Json& json, const Tower& tower, const std::string& file) {
  const Fields f(json, file);
  f.only("architectures", Json::array({tower.architecture}));
  const bool nested = f.has("text_config");
  require(nested || tower.flat, file, ": the field \"text_config\" is missing");
  Json text = nested ? json.at("text_config") : json;
  require(text.is_object(), file, ": \"text_config\" is not an object");
  for (const char* name : {"architectures", "vision_config"}) text.erase(name);  // of the whole model
  if (json.contains("quantization_config")) text["quantization_config"] = json.at("quantization_config");
  // Versions of transformers disagree on which of the two counts.
  const char* const tied = "tie_word_embeddings";
  if (json.value(tied, Json()) == true || (json.contains(tied) && !text.contains(tied))) text[tied] = json.at(tied);
  // fields of SmolVLM's text models without effect
  for (const char* name : {"pixel_shuffle_factor", "perceiver_config", "neftune_noise_alpha"}) text.erase(name);
  for (const char* name : {"qk_layer_norms", "use_resampler"})
    if (text.value(name, Json()) == false) text.erase(name);
  const Json usual = parse_json(tower.usual);
  text.insert(usual.begin(), usual.end());
  const auto type = nested ? Fields(text, file).get<std::string>("model_type", tower.text) : std::string(tower.text);
  require(!tower_of(type), file, ": the text model of a ", tower.type, " model cannot be of type ", quote(type));
  text["model_type"] = type == tower.type + std::string("_text") && type != "gemma3_text" ? tower.text : type;
  return text;
}

}  // namespace streambp
