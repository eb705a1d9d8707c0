// Families that differ from Llama in biases, tensor names, RoPE, windows and activation.
#pragma once

#include <cmath>
#include <string_view>
#include <vector>

#include "model/family.h"

namespace streambp {

inline double query_heads(const Config& c) { return static_cast<double>(c.heads); }
inline double hidden_per_head(const Config& c) { return static_cast<double>(c.hidden) / query_heads(c); }
inline double four_times_hidden(const Config& c) { return 4 * static_cast<double>(c.hidden); }
inline double root_of_hidden(const Config& c) { return std::sqrt(static_cast<double>(c.hidden)); }

inline void window_of_2047(Config& c) { c.window = 2047; }

// clang-format off
// Fields with changes: each replaces the fields of the same name, or is added.
inline std::vector<Field> with_changes(std::vector<Field> fields, const std::vector<Field>& changes) {
  for (const Field& change : changes) {
    std::erase_if(fields, [&](const Field& f) { return *f.name && f.name == std::string_view(change.name); });
  }
  fields.insert(fields.end(), changes.begin(), changes.end());
  return fields;
}

inline std::vector<Field> llama_fields(const std::vector<Field>& changes = {}) {
  const std::vector<Field> fields = {
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
  return with_changes(fields, changes);
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

// As Llama; three of four layers are local.
inline ModelFamily cwm() {
  const RopeScaling rope = {RopeType::llama3, 16, 8192};
  return {
      .name = "cwm", .type = "cwm", .architecture = "CwmForCausalLM",
      .defaults = {.rope_theta = 1e6, .rope_scaling = rope, .window = 8192},
      .fields = llama_fields({{"vocab_size", &Config::vocab, 128256}, {"hidden_size", &Config::hidden, 6144},
                              {"num_hidden_layers", &Config::layers, 64}, {"num_attention_heads", &Config::heads, 48},
                              {"num_key_value_heads", &Config::kv_heads, 8}, {"head_dim", &Config::head_dim, 128},
                              {"intermediate_size", &Config::mlp, 21504}, {"rms_norm_eps", &Config::norm_eps, 1e-5},
                              {"max_position_embeddings", &Config::max_length, 131072},
                              {"rope_theta", &Config::rope_theta, 1e6}}),
      .local = LocalLayers::most, .global_every = 4, .global_first = true, .usual_window = 8192,
      .published = {{"cwm", {128256, 6144, 64, 48, 8, 128, 21504, 131072, false}, 0, rope}}};
}

inline ModelFamily mistral() {
  return {
      .name = "mistral", .type = "mistral", .architecture = "MistralForCausalLM",
      .defaults = {.window = 4096},
      .fields = llama_fields(),
      .local = LocalLayers::all,
      .published = {{"mistral-7b-v0.1", {32000, 4096, 32, 32, 8, 128, 14336, 32768, false}}}};
}

// As Mistral, but files may list which layers are local.
inline ModelFamily ministral() {
  return {
      .name = "ministral", .type = "ministral", .architecture = "MinistralForCausalLM",
      .defaults = {.norm_eps = 1e-6, .window = 4096},
      .fields = llama_fields(),
      .local = LocalLayers::all_or_listed};
}

// As Mistral, with YaRN, and queries scaled by a factor that grows with the position.
inline ModelFamily ministral3() {
  const RopeScaling yarn = {.type = RopeType::yarn, .factor = 16, .original_length = 16384, .query_beta = 0.1};
  return {
      .name = "ministral3", .type = "ministral3", .architecture = "Ministral3ForCausalLM",
      .defaults = {.rope_theta = 1e6,  // files must have the scaling; a factor of 1 changes nothing
                   .rope_scaling = {.type = RopeType::yarn, .factor = 1, .original_length = 16384, .query_beta = 0.1}},
      .fields = llama_fields({{"head_dim", &Config::head_dim, 128}, {"rms_norm_eps", &Config::norm_eps, 1e-5}}),
      .local = LocalLayers::all,
      .query_beta = true,
      .published = {{"ministral-3-3b",  {131072, 3072, 26, 32, 8, 128,  9216, 262144, true},  0, yarn},
                    {"ministral-3-8b",  {131072, 4096, 34, 32, 8, 128, 14336, 262144, false}, 0, yarn},
                    {"ministral-3-14b", {131072, 5120, 40, 32, 8, 128, 16384, 262144, false}, 1e9, yarn}}};
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
      .defaults = {.norm_eps = 1e-6, .rope_theta = 1e6, .qk_norm = QkNorm::heads, .tied = true},
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
                              {"mlp_type", Only{}, "default"}, {"norm_type", Only{}, "layer_norm"},
                              {"hidden_act", Fixed{}, "gelu_pytorch_tanh"}}),
      .local = LocalLayers::all_if_named,
      .modules = {.up = "mlp.c_fc", .down = "mlp.c_proj"},
      .published = {{"starcoder2-3b",  {49152, 3072, 30, 24, 2, 128, 12288, 16384, true}},
                    {"starcoder2-7b",  {49152, 4608, 32, 36, 4, 128, 18432, 16384, true}},
                    {"starcoder2-15b", {49152, 6144, 40, 48, 4, 128, 24576, 16384, false}, 1e5}}};
}

// As Llama; q, k and v are one tensor in files, and so are gate and up. Some models rotate only some numbers of each head.
inline ModelFamily phi3() {
  return {
      .name = "phi3", .type = "phi3", .architecture = "Phi3ForCausalLM",
      .fields = llama_fields({{"rms_norm_eps", &Config::norm_eps, 1e-5},
                              {"partial_rotary_factor", &Config::rotary_share, 1.0, Written::if_unusual},
                              {"original_max_position_embeddings", Ignored{}}, {"interpolate_factor", Ignored{}},
                              {"full_attn_mod", Ignored{}}, {"lm_head_bias", Only{}, false}}),
      .local = LocalLayers::all,
      .modules = {.q = "self_attn.qkv_proj", .k = "self_attn.qkv_proj", .v = "self_attn.qkv_proj",
                  .gate = "mlp.gate_up_proj", .up = "mlp.gate_up_proj"},
      .published = {{"phi-3-mini-4k", { 32064, 3072, 32, 32, 32,  96,  8192,  4096, false}, 0, {}, window_of_2047},
                    {"phi-4",         {100352, 5120, 40, 40, 10, 128, 17920, 16384, false}, 2.5e5}}};
}

// As Llama, with interleaved RoPE.
inline ModelFamily ernie4_5() {
  return {
      .name = "ernie4_5", .type = "ernie4_5", .architecture = "Ernie4_5ForCausalLM",
      .older_architecture = "Ernie4_5_ForCausalLM",
      .defaults = {.rope_theta = 5e5, .rope_pairs = RopePairs::interleaved, .tied = true},
      .fields = llama_fields({{"head_dim", &Config::head_dim, 128},
                              {"rms_norm_eps", &Config::norm_eps, 1e-5},
                              {"rope_theta", &Config::rope_theta, 5e5},
                              {"tie_word_embeddings", &Config::tied, true},
                              {"attention_bias", Ignored{}}, {"mlp_bias", Ignored{}},
                              {"use_bias", &Config::qkv_bias, false}, {"use_bias", &Config::output_bias, false},
                              {"use_bias", &Config::mlp_bias, false}}),
      .published = {{"ernie-4.5-0.3b", {103424, 1024, 18, 16, 2, 128, 3072, 131072, true}}}};
}

// As Llama, with interleaved RoPE.
inline ModelFamily helium() {
  return {
      .name = "helium", .type = "helium", .architecture = "HeliumForCausalLM",
      .defaults = {.norm_eps = 1e-8, .rope_theta = 1e5, .rope_pairs = RopePairs::interleaved},
      .fields = llama_fields({{"head_dim", &Config::head_dim, 128},
                              {"rms_norm_eps", &Config::norm_eps, 1e-8},
                              {"rope_theta", &Config::rope_theta, 1e5},
                              {"attention_bias", &Config::qkv_bias, false}}),
      .published = {{"helium-1-2b", {64000, 2048, 28, 16, 8, 128, 8192, 4096, false}, 2e4}}};
}

// As Llama, with an MLP of relu² without a gate.
inline ModelFamily arcee() {
  return {
      .name = "arcee", .type = "arcee", .architecture = "ArceeForCausalLM",
      .defaults = {.mlp_kind = Mlp::relu2},
      .fields = llama_fields({{"rms_norm_eps", &Config::norm_eps, 1e-5}, {"hidden_act", Fixed{}, "relu2"}}),
      .published = {{"afm-4.5b", {128004, 2560, 36, 20, 4, 128, 18432, 65536, false}, 0,
                     {.type = RopeType::yarn, .factor = 20, .original_length = 4096,
                      .attention_factor = 1.2995732273553991}}}};
}
// clang-format on

}  // namespace streambp
