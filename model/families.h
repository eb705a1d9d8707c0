// The model families. Each is one description, from which config.json is read and written, tensors get their names, and
// --family and the names of published models get their configurations. A family that differs from others in fields of
// Config only is one more description, and no other change.
//
// What `defaults` say about the architecture holds for all models of a family; its fields replace the rest.
#pragma once

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "model/config.h"

namespace streambp {

// --- What a description consists of ---

template <class V>
using Member = V Config::*;

// A field of config.json stands for a member of Config, or is one of these:
struct Fixed {};    // always has this value
struct Only {};     // the same, but need not be written
struct Ignored {};  // has no effect
struct InverseSquare {
  Member<double> member;  // the field is 1 / member²
};

// A value that follows from fields further up.
struct Formula {
  const char* text;
  double (*of)(const Config&);
};

enum class Written { always, if_unusual };

struct Field {
  const char* name;  // empty: in no file
  std::variant<Member<Index>, Member<double>, Member<bool>, InverseSquare, Fixed, Only, Ignored> meaning;
  // The value in files that do not have the field. Without one they must have it.
  std::variant<std::monostate, Index, double, bool, const char*, Formula> value = {};
  Written written = Written::always;
};

// Which layers are local if a file does not list them. `upper` needs "use_sliding_window", all_if_named needs
// "sliding_window".
enum class LocalLayers { none, all, all_if_named, upper, all_but_every_sixth };

// The names of modules in files; their tensors are NAME.weight and NAME.bias. Linear layers of one name are parts of one
// tensor, in the order of the layer's table.
struct Modules {
  const char *tokens = "model.embed_tokens", *positions = "", *layers = "model.layers.", *norm = "model.norm";
  // in a layer
  const char *attention_norm = "input_layernorm", *mlp_norm = "post_attention_layernorm";
  const char *q = "self_attn.q_proj", *k = "self_attn.k_proj", *v = "self_attn.v_proj", *o = "self_attn.o_proj";
  const char *q_norm = "self_attn.q_norm", *k_norm = "self_attn.k_norm";
  const char *post_attention_norm = "", *post_mlp_norm = "";
  const char *gate = "mlp.gate_proj", *up = "mlp.up_proj", *down = "mlp.down_proj";

  bool transposed = false;  // linear layers are stored as (inputs x outputs)
  const char* root = "";    // comes before all names but the head's: always in adapters, sometimes in models
  std::vector<const char*> unused = {};  // the ends of names of tensors that files have without need
};

// What distinguishes the models of a family.
struct Sizes {
  Index vocab, hidden, layers, heads, kv_heads, head_dim, mlp, max_length;
  bool tied;
};
struct Published {
  const char* name;
  Sizes sizes;
  double rope_theta = 0;  // 0: the family's
  RopeScaling rope_scaling = {};
};

struct ModelFamily {
  const char* name;                 // for --family
  const char *type, *architecture;  // in config.json
  Config defaults = {};             // of a new model
  std::vector<Field> fields = {};   // in an order in which formulas find what they need
  LocalLayers local = LocalLayers::none;
  Index without_rope_every = 0;  // every n-th layer has no RoPE, if a file does not list them; 0: all have it
  Modules modules = {};
  std::vector<Published> published = {};
};

// --- The families ---

inline double query_heads(const Config& c) { return static_cast<double>(c.heads); }
inline double hidden_per_head(const Config& c) { return static_cast<double>(c.hidden) / query_heads(c); }
inline double four_times_hidden(const Config& c) { return 4 * static_cast<double>(c.hidden); }
inline double root_of_hidden(const Config& c) { return std::sqrt(static_cast<double>(c.hidden)); }

// clang-format off
// Llama's fields, with changes: each replaces the fields of the same name, or is added.
inline std::vector<Field> llama_fields(const std::vector<Field>& changes = {}) {
  std::vector<Field> fields = {
      {"vocab_size", &Config::vocab},
      {"hidden_size", &Config::hidden},
      {"num_hidden_layers", &Config::layers},
      {"num_attention_heads", &Config::heads},
      {"num_key_value_heads", &Config::kv_heads, Formula{"num_attention_heads", query_heads}},
      {"head_dim", &Config::head_dim, Formula{"hidden_size / num_attention_heads", hidden_per_head}},
      {"intermediate_size", &Config::mlp},
      {"max_position_embeddings", &Config::max_length, 0},  // 0: unknown
      {"rms_norm_eps", &Config::norm_eps, 1e-6},
      {"rope_theta", &Config::rope_theta, 1e4},
      {"tie_word_embeddings", &Config::tied, false},
      {"attention_bias", &Config::output_bias, false},
      {"attention_bias", &Config::qkv_bias, false},
      {"mlp_bias", &Config::mlp_bias, false, Written::if_unusual},
      {"hidden_act", Fixed{}, "silu"}, {"hidden_activation", Only{}, "silu"},
      {"partial_rotary_factor", Only{}, 1.0}, {"rope_interleaved", Only{}, false}, {"use_mrope", Only{}, false}};
  for (const Field& change : changes) {
    std::erase_if(fields, [&](const Field& f) { return *f.name && f.name == std::string_view(change.name); });
  }
  fields.insert(fields.end(), changes.begin(), changes.end());
  return fields;
}

inline ModelFamily gpt2() {
  return {
      .name = "gpt2", .type = "gpt2", .architecture = "GPT2LMHeadModel",
      .defaults = {.norm = Norm::layer, .positions = Positions::learned, .mlp_kind = Mlp::gelu,
                   .qkv_bias = true, .output_bias = true, .mlp_bias = true, .tied = true},
      .fields = {{"vocab_size", &Config::vocab},
                 {"n_embd", &Config::hidden},
                 {"n_layer", &Config::layers},
                 {"n_head", &Config::heads},
                 {"", &Config::kv_heads, Formula{"n_head", query_heads}},
                 {"", &Config::head_dim, Formula{"n_embd / n_head", hidden_per_head}},
                 {"n_positions", &Config::max_length, 1024},
                 {"n_inner", &Config::mlp, Formula{"4 n_embd", four_times_hidden}},
                 {"layer_norm_epsilon", &Config::norm_eps, 1e-5},
                 {"tie_word_embeddings", &Config::tied, true},
                 {"activation_function", Fixed{}, "gelu_new"},
                 {"scale_attn_weights", Only{}, true}, {"scale_attn_by_inverse_layer_idx", Only{}, false},
                 {"reorder_and_upcast_attn", Only{}, false}, {"add_cross_attention", Only{}, false}},
      .modules = {.tokens = "wte", .positions = "wpe", .layers = "h.", .norm = "ln_f",
                  .attention_norm = "ln_1", .mlp_norm = "ln_2",
                  .q = "attn.c_attn", .k = "attn.c_attn", .v = "attn.c_attn", .o = "attn.c_proj",
                  .up = "mlp.c_fc", .down = "mlp.c_proj", .transposed = true,
                  .root = "transformer.", .unused = {".attn.bias", ".attn.masked_bias"}},
      //                            vocab hidden layers heads kv dim   mlp length  tied
      .published = {{"gpt2",        {50257,  768, 12, 12, 12, 64, 3072, 1024, true}},
                    {"gpt2-medium", {50257, 1024, 24, 16, 16, 64, 4096, 1024, true}},
                    {"gpt2-large",  {50257, 1280, 36, 20, 20, 64, 5120, 1024, true}},
                    {"gpt2-xl",     {50257, 1600, 48, 25, 25, 64, 6400, 1024, true}}}};
}

inline ModelFamily llama() {
  return {
      .name = "llama", .type = "llama", .architecture = "LlamaForCausalLM",
      .fields = llama_fields({{"sliding_window", Only{}, 0}, {"layer_types", Ignored{}}}),
      //                                vocab hidden layers heads kv dim  mlp  length   tied  theta  scaling
      .published = {{"smollm2-135m",   { 49152,  576, 30,  9,  3,  64,  1536,   8192, true}, 1e5},
                    {"smollm2-360m",   { 49152,  960, 32, 15,  5,  64,  2560,   8192, true}, 1e5},
                    {"smollm2-1.7b",   { 49152, 2048, 24, 32, 32,  64,  8192,   8192, true}, 1.3e5},
                    {"tinyllama-1.1b", { 32000, 2048, 22, 32,  4,  64,  5632,   2048, false}},
                    {"llama-2-7b",     { 32000, 4096, 32, 32, 32, 128, 11008,   4096, false}},
                    {"llama-3.1-8b",   {128256, 4096, 32, 32,  8, 128, 14336, 131072, false}, 5e5, {RopeType::llama3, 8, 8192}},
                    {"llama-3.2-1b",   {128256, 2048, 16, 32,  8,  64,  8192, 131072, true}, 5e5, {RopeType::llama3, 32, 8192}},
                    {"llama-3.2-3b",   {128256, 3072, 28, 24,  8, 128,  8192, 131072, true}, 5e5, {RopeType::llama3, 32, 8192}}}};
}

inline ModelFamily mistral() {
  return {
      .name = "mistral", .type = "mistral", .architecture = "MistralForCausalLM",
      .defaults = {.window = 4096},
      .fields = llama_fields(),
      .local = LocalLayers::all,
      .published = {{"mistral-7b-v0.1", {32000, 4096, 32, 32, 8, 128, 14336, 32768, false}}}};
}

inline ModelFamily qwen2() {
  return {
      .name = "qwen2", .type = "qwen2", .architecture = "Qwen2ForCausalLM",
      .defaults = {.norm_eps = 1e-6, .rope_theta = 1e6, .qkv_bias = true, .tied = true},
      .fields = llama_fields({{"attention_bias", Ignored{}, false}}),
      .local = LocalLayers::upper,
      .published = {{"qwen2.5-0.5b", {151936,  896, 24, 14, 2,  64,  4864,  32768, true}},
                    {"qwen2.5-1.5b", {151936, 1536, 28, 12, 2, 128,  8960, 131072, true}},
                    {"qwen2.5-3b",   {151936, 2048, 36, 16, 2, 128, 11008,  32768, true}},
                    {"qwen2.5-7b",   {152064, 3584, 28, 28, 4, 128, 18944, 131072, false}}}};
}

inline ModelFamily qwen3() {
  return {
      .name = "qwen3", .type = "qwen3", .architecture = "Qwen3ForCausalLM",
      .defaults = {.norm_eps = 1e-6, .rope_theta = 1e6, .qk_norm = true, .tied = true},
      .fields = llama_fields({{"head_dim", &Config::head_dim, 128}}),
      .local = LocalLayers::upper,
      .published = {{"qwen3-0.6b", {151936, 1024, 28, 16, 8, 128,  3072, 40960, true}},
                    {"qwen3-1.7b", {151936, 2048, 28, 16, 8, 128,  6144, 40960, true}},
                    {"qwen3-4b",   {151936, 2560, 36, 32, 8, 128,  9728, 40960, true}},
                    {"qwen3-8b",   {151936, 4096, 36, 32, 8, 128, 12288, 40960, false}},
                    {"qwen3-14b",  {151936, 5120, 40, 40, 8, 128, 17408, 40960, false}},
                    {"qwen3-32b",  {151936, 5120, 64, 64, 8, 128, 25600, 40960, false}}}};
}

// As Llama, with biases of queries, keys and values.
inline ModelFamily seed_oss() {
  return {
      .name = "seed_oss", .type = "seed_oss", .architecture = "SeedOssForCausalLM",
      .defaults = {.norm_eps = 1e-6, .rope_theta = 1e7, .qkv_bias = true},
      .fields = llama_fields({{"head_dim", &Config::head_dim, 128},
                              {"attention_bias", &Config::qkv_bias, true},
                              {"attention_out_bias", &Config::output_bias, false}}),
      .published = {{"seed-oss-36b", {155136, 5120, 64, 80, 8, 128, 27648, 524288, false}}}};
}

// As Llama, but every fourth layer has no RoPE.
inline ModelFamily smollm3() {
  return {
      .name = "smollm3", .type = "smollm3", .architecture = "SmolLM3ForCausalLM",
      .defaults = {.norm_eps = 1e-6, .rope_theta = 5e6, .tied = true},
      .fields = llama_fields({{"rope_theta", &Config::rope_theta, 2e6},
                              {"tie_word_embeddings", &Config::tied, true},
                              {"use_sliding_window", Only{}, false}, {"sliding_window", Ignored{}},
                              {"layer_types", Ignored{}}}),
      .without_rope_every = 4,
      .published = {{"smollm3-3b", {128256, 2048, 36, 16, 4, 128, 11008, 65536, true}}}};
}

// LayerNorm, biases everywhere, and GPT-2's MLP with RoPE.
inline ModelFamily starcoder2() {
  return {
      .name = "starcoder2", .type = "starcoder2", .architecture = "Starcoder2ForCausalLM",
      .defaults = {.norm = Norm::layer, .rope_theta = 1e6, .mlp_kind = Mlp::gelu,
                   .qkv_bias = true, .output_bias = true, .mlp_bias = true, .tied = true, .window = 4096},
      .fields = llama_fields({{"norm_epsilon", &Config::norm_eps, 1e-5}, {"rms_norm_eps", Ignored{}},
                              {"use_bias", &Config::qkv_bias, true}, {"use_bias", &Config::output_bias, true},
                              {"use_bias", &Config::mlp_bias, true}, {"attention_bias", Ignored{}},
                              {"mlp_bias", Ignored{}}, {"tie_word_embeddings", &Config::tied, true},
                              {"hidden_act", Fixed{}, "gelu_pytorch_tanh"}}),
      .local = LocalLayers::all_if_named,
      .modules = {.up = "mlp.c_fc", .down = "mlp.c_proj"},
      .published = {{"starcoder2-3b",  {49152, 3072, 30, 24, 2, 128, 12288, 16384, true}},
                    {"starcoder2-7b",  {49152, 4608, 32, 36, 4, 128, 18432, 16384, true}},
                    {"starcoder2-15b", {49152, 6144, 40, 48, 4, 128, 24576, 16384, false}, 1e5}}};
}

// As Qwen3, with norms of 1 + weight, also on the outputs of attention and MLP, and scaled embeddings and scores. Most
// layers are local and have a second RoPE theta.
inline ModelFamily gemma3() {
  return {
      .name = "gemma3", .type = "gemma3_text", .architecture = "Gemma3ForCausalLM",
      .defaults = {.norm_eps = 1e-6, .norm_offset = 1, .post_norms = true, .rope_theta = 1e6, .mlp_kind = Mlp::geglu,
                   .qk_norm = true, .tied = true, .window = 512, .local_rope_theta = 1e4},
      .fields = llama_fields({{"head_dim", &Config::head_dim, 256},
                              {"rope_theta", &Config::rope_theta, 1e6},
                              {"rope_local_base_freq", &Config::local_rope_theta, 1e4},
                              {"tie_word_embeddings", &Config::tied, true},
                              {"query_pre_attn_scalar", InverseSquare{&Config::score_scale}, 256.0},
                              {"", &Config::embedding_scale, Formula{"√hidden_size", root_of_hidden}},
                              {"hidden_act", Only{}, "gelu_pytorch_tanh"},
                              {"hidden_activation", Fixed{}, "gelu_pytorch_tanh"},
                              {"use_bidirectional_attention", Only{}, false}}),
      .local = LocalLayers::all_but_every_sixth,
      .modules = {.mlp_norm = "pre_feedforward_layernorm", .post_attention_norm = "post_attention_layernorm",
                  .post_mlp_norm = "post_feedforward_layernorm"},
      .published = {{"gemma-3-270m", {262144,  640, 18, 4, 1, 256, 2048, 32768, true}},
                    {"gemma-3-1b",   {262144, 1152, 26, 4, 1, 256, 6912, 32768, true}}}};
}
// clang-format on

// All families. A program may add its own.
inline std::deque<ModelFamily>& model_families() {
  static std::deque<ModelFamily> all = {gpt2(),   llama(),    mistral(), qwen2(),     qwen3(),
                                        gemma3(), seed_oss(), smollm3(), starcoder2()};
  return all;
}
inline const ModelFamily& family_named(const std::string& name) {
  const auto found = std::ranges::find(model_families(), name, &ModelFamily::name);
  require(found != model_families().end(), "unknown model family ", quote(name));
  return *found;
}
inline const ModelFamily& family_of(const Config& c) { return family_named(c.family); }

// Every n-th layer.
inline std::vector<bool> every_layer(Index n, Index layers) {
  std::vector<bool> result;
  for (Index l = 1; l <= layers; ++l) result.push_back(l % n == 0);
  return result;
}

// A new model of a family.
inline Config make_config(const std::string& family, const Sizes& s) {
  const ModelFamily& f = family_named(family);
  Config c = f.defaults;
  c.family = family;
  c.vocab = s.vocab, c.hidden = s.hidden, c.layers = s.layers;
  c.heads = s.heads, c.kv_heads = s.kv_heads, c.head_dim = s.head_dim;
  c.mlp = s.mlp, c.max_length = s.max_length, c.tied = s.tied;
  for (const Field& field : f.fields) {
    const auto* number = std::get_if<Member<double>>(&field.meaning);
    if (number && !*field.name) c.*(*number) = std::get<Formula>(field.value).of(c);
    const auto* scale = std::get_if<InverseSquare>(&field.meaning);
    if (scale) c.*scale->member = 1 / std::sqrt(static_cast<double>(s.head_dim));
  }
  const bool mixed = f.local == LocalLayers::all_but_every_sixth;
  for (Index l = 0; mixed && l < s.layers; ++l) c.local.push_back((l + 1) % 6 != 0);
  if (f.without_rope_every > 0) c.without_rope = every_layer(f.without_rope_every, s.layers);
  return c;
}

// Published models, by name.
inline std::map<std::string, Config> known_models() {
  std::map<std::string, Config> models;
  for (const ModelFamily& family : model_families()) {
    for (const auto& [name, sizes, theta, scaling] : family.published) {
      Config& c = models[name] = make_config(family.name, sizes);
      if (theta > 0) c.rope_theta = theta;
      c.rope_scaling = scaling;
    }
  }
  return models;
}

}  // namespace streambp
