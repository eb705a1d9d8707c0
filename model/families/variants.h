// Families that differ from Llama in the topology of a layer: where norms stand, which branches follow each other, and
// what is scaled.
#pragma once

#include <cmath>

#include "model/families/llama_like.h"

namespace streambp {

inline double theta_of_rope(const Config& c) { return c.rope_theta; }
inline double key_value_heads(const Config& c) { return static_cast<double>(c.kv_heads); }

// --- In what some published models differ from their family ---

inline const RopeScaling kOlmo3Rope = {
    .type = RopeType::yarn, .factor = 8, .original_length = 8192, .attention_factor = 1.2079441541679836};
inline const RopeScaling kExaone4Rope = {.type = RopeType::llama3, .factor = 16, .original_length = 8192};
const double kHunyuanTheta = 1e4 * std::pow(1000, 128 / 126.0);
inline void without_qkv_bias(Config& c) { c.qkv_bias = false; }
inline void granite_8b(Config& c) { c.score_scale = 1.0 / 128, c.logit_scale = 1.0 / 16; }
inline void gemma4_31b(Config& c) { c.global_kv_heads = 4, c.window = 1024, c.logit_cap = 30; }
inline void gemma4_12b(Config& c) { gemma4_31b(c), c.global_kv_heads = 1; }
inline void score_scale_12th(Config& c) { c.score_scale = 1.0 / 12; }
inline void all_global(Config& c) { c.window = 0, c.local.assign(c.local.size(), false), c.without_rope.clear(); }
inline void logit_scale_8th(Config& c) { c.logit_scale = 0.125; }
inline void command_r_plus(Config& c) { c.qk_norm = QkNorm::own_weights, c.logit_scale = 0.8333333333333334; }
inline void logit_scale_4th(Config& c) { c.logit_scale = 0.25; }

// clang-format off
// As Llama, with norms of 1 + weight, GeGLU and scaled embeddings.
inline ModelFamily gemma() {
  return {
      .name = "gemma", .type = "gemma", .architecture = "GemmaForCausalLM",
      .defaults = {.norm_eps = 1e-6, .norm_offset = 1, .mlp_kind = Mlp::geglu, .tied = true},
      .fields = llama_fields({{"head_dim", &Config::head_dim, 256},
                              {"tie_word_embeddings", &Config::tied, true},
                              {"", &Config::embedding_scale, Formula{"√hidden_size", root_of_hidden}},
                              {"hidden_act", Either{"gelu"}, "gelu_pytorch_tanh"},
                              {"hidden_activation", Only{}, "gelu_pytorch_tanh"},
                              {"use_bidirectional_attention", Only{}, false}}),
      .published = {{"gemma-2b", {256000, 2048, 18,  8,  1, 256, 16384, 8192, true}},
                    {"gemma-7b", {256000, 3072, 28, 16, 16, 256, 24576, 8192, true}}}};
}

// As Gemma, with norms of the outputs of attention and MLP too, soft caps of scores and logits, and every second layer
// local.
inline ModelFamily gemma2() {
  ModelFamily f = gemma();
  f.name = f.type = "gemma2", f.architecture = "Gemma2ForCausalLM";
  f.defaults.post_norms = true, f.defaults.window = 4096, f.defaults.score_cap = 50, f.defaults.logit_cap = 30;
  f.fields = with_changes(f.fields, {
      {"query_pre_attn_scalar", InverseSquare{&Config::score_scale}, 256.0},
      {"attn_logit_softcapping", OrNull{&Config::score_cap}, 50.0},
      {"final_logit_softcapping", OrNull{&Config::logit_cap}, 30.0},
      {"hidden_act", Only{}, "gelu_pytorch_tanh"}, {"hidden_activation", Fixed{}, "gelu_pytorch_tanh"},
      {"sliding_window_size", Ignored{}}});
  f.local = LocalLayers::most, f.global_every = 2;
  f.modules = {.mlp_norm = "pre_feedforward_layernorm", .post_attention_norm = "post_attention_layernorm",
               .post_mlp_norm = "post_feedforward_layernorm"};
  f.published = {{"gemma-2-2b",  {256000, 2304, 26,  8,  4, 256,  9216, 8192, true}},
                 {"gemma-2-9b",  {256000, 3584, 42, 16,  8, 256, 14336, 8192, true}},
                 {"gemma-2-27b", {256000, 4608, 46, 32, 16, 128, 36864, 8192, true}, 0, {}, score_scale_12th}};
  return f;
}

// As Gemma, with norms of queries and keys, and of the outputs of attention and MLP. Most layers are local and have a
// second RoPE theta.
inline ModelFamily gemma3() {
  return {
      .name = "gemma3", .type = "gemma3_text", .architecture = "Gemma3ForCausalLM",
      .defaults = {.norm_eps = 1e-6, .norm_offset = 1, .post_norms = true, .rope_theta = 1e6, .mlp_kind = Mlp::geglu,
                   .qk_norm = QkNorm::heads, .tied = true, .window = 512, .local_rope_theta = 1e4},
      // the first fields are often left out
      .fields = llama_fields({{"vocab_size", &Config::vocab, 262208},
                              {"num_attention_heads", &Config::heads, 8},
                              {"num_key_value_heads", &Config::kv_heads, 4},
                              {"head_dim", &Config::head_dim, 256},
                              {"rope_theta", &Config::rope_theta, 1e6},
                              {"rope_local_base_freq", &Config::local_rope_theta, 1e4},
                              {"tie_word_embeddings", &Config::tied, true},
                              {"query_pre_attn_scalar", InverseSquare{&Config::score_scale}, 256.0},
                              {"final_logit_softcapping", OrNull{&Config::logit_cap}, 0.0},
                              {"", &Config::embedding_scale, Formula{"√hidden_size", root_of_hidden}},
                              {"hidden_act", Only{}, "gelu_pytorch_tanh"},
                              {"hidden_activation", Fixed{}, "gelu_pytorch_tanh"},
                              {"use_bidirectional_attention", Only{}, false}}),
      .local = LocalLayers::most, .global_every = 6,
      .modules = {.mlp_norm = "pre_feedforward_layernorm", .post_attention_norm = "post_attention_layernorm",
                  .post_mlp_norm = "post_feedforward_layernorm"},
      .published = {{"gemma-3-270m", {262144,  640, 18, 4, 1, 256, 2048, 32768, true}},
                    {"gemma-3-1b",   {262144, 1152, 26, 4, 1, 256, 6912, 32768, true}}}};
}

// As Gemma 3, but norms multiply by their weight, values have a norm, too, and global layers have wider heads and may have
// keys for values. Layers scale their output.
inline ModelFamily gemma4() {
  ModelFamily f = gemma3();
  f.name = "gemma4", f.type = "gemma4_text", f.architecture = "Gemma4ForCausalLM";
  Config& c = f.defaults;
  c.norm_offset = 0, c.score_scale = 1, c.rope_scaling = {.type = RopeType::proportional, .share = 0.25};
  c.global_head_dim = 512, c.value_norm = c.keys_are_values = c.layer_scale = true;
  f.fields = with_changes(f.fields, {
      {"vocab_size", &Config::vocab, 262144},
      {"rope_theta", Ignored{}}, {"rope_local_base_freq", Ignored{}}, {"query_pre_attn_scalar", Ignored{}},
      {"global_head_dim", &Config::global_head_dim, 512},
      {"num_global_key_value_heads", &Config::global_kv_heads, Formula{"num_key_value_heads", key_value_heads}},
      {"attention_k_eq_v", &Config::keys_are_values, false},
      {"hidden_size_per_layer_input", Fixed{}, 0}, {"vocab_size_per_layer_input", Ignored{}},  // data/files/config.h
      {"num_kv_shared_layers", Only{}, 0}, {"use_double_wide_mlp", Only{}, false}, {"enable_moe_block", Ignored{}},
      {"num_experts", Ignored{}}, {"top_k_experts", Ignored{}}, {"moe_intermediate_size", Ignored{}},
      {"use_bidirectional_attention", Either{"vision"}, false, Written::if_unusual}});
  f.usual_window = 512, f.global_last = true;
  f.modules.layer_scale = "layer_scalar";
  f.published = {{"gemma-4-12b", {262144, 3840, 48, 16,  8, 256, 15360, 262144, true}, 0, c.rope_scaling, gemma4_12b},
                 {"gemma-4-31b", {262144, 5376, 60, 32, 16, 256, 21504, 262144, true}, 0, c.rope_scaling, gemma4_31b}};
  return f;
}

// Norms follow the branches instead of preceding them; queries and keys have a norm over all heads.
inline ModelFamily olmo2() {
  return {
      .name = "olmo2", .type = "olmo2", .architecture = "Olmo2ForCausalLM",
      .defaults = {.norm_eps = 1e-6, .pre_norms = false, .post_norms = true, .rope_theta = 5e5, .qk_norm = QkNorm::all},
      .fields = llama_fields({{"rms_norm_eps", &Config::norm_eps, 1e-5}}),
      .modules = {.post_attention_norm = "post_attention_layernorm", .post_mlp_norm = "post_feedforward_layernorm"},
      .published = {{"olmo-2-1b",  {100352, 2048, 16, 16, 16, 128,  8192, 4096, false}},
                    {"olmo-2-7b",  {100352, 4096, 32, 32, 32, 128, 11008, 4096, false}},
                    {"olmo-2-13b", {100352, 5120, 40, 40, 40, 128, 13824, 4096, false}},
                    {"olmo-2-32b", {100352, 5120, 64, 40,  8, 128, 27648, 4096, false}}}};
}

// As OLMo 2; three of four layers are local, and their RoPE is not scaled.
inline ModelFamily olmo3() {
  ModelFamily f = olmo2();
  f.name = f.type = "olmo3", f.architecture = "Olmo3ForCausalLM";
  f.defaults.window = 4096, f.defaults.local_rope_theta = 5e5;
  f.fields = llama_fields({{"rms_norm_eps", &Config::norm_eps, 1e-5},
                           {"rope_theta", &Config::rope_theta, 5e5},
                           {"", &Config::local_rope_theta, Formula{"rope_theta", theta_of_rope}}});
  f.local = LocalLayers::most, f.global_every = 4;
  f.published = {{"olmo-3-7b",  {100278, 4096, 32, 32, 32, 128, 11008, 65536, false}, 0, kOlmo3Rope},
                 {"olmo-3-32b", {100278, 5120, 64, 40,  8, 128, 27648, 65536, false}, 0, kOlmo3Rope}};
  return f;
}

// Norms follow the branches. Where three of four layers are local, only these have RoPE.
inline ModelFamily exaone4() {
  return {
      .name = "exaone4", .type = "exaone4", .architecture = "Exaone4ForCausalLM",
      .defaults = {.pre_norms = false, .post_norms = true, .rope_theta = 1e6, .qk_norm = QkNorm::heads, .window = 4096},
      .fields = llama_fields({{"num_key_value_heads", &Config::kv_heads, 32},
                              {"rms_norm_eps", &Config::norm_eps, 1e-5}}),
      .local = LocalLayers::most, .global_every = 4, .local_rope = true, .rope_without_window = true,
      .modules = {.post_attention_norm = "post_attention_layernorm", .post_mlp_norm = "post_feedforward_layernorm"},
      .published = {{"exaone-4.0-1.2b", {102400, 2048, 30, 32, 8,  64,  4096,  65536, true}, 0, kExaone4Rope, all_global},
                    {"exaone-4.0-32b",  {102400, 5120, 64, 40, 8, 128, 27392, 131072, false}, 0, kExaone4Rope}}};
}

// Interleaved RoPE in half of each head; gate and up are one tensor in files.
inline ModelFamily glm() {
  return {
      .name = "glm", .type = "glm", .architecture = "GlmForCausalLM",
      .defaults = {.norm_eps = 1.5625e-7, .rope_pairs = RopePairs::interleaved, .rotary_share = 0.5, .qkv_bias = true},
      .fields = llama_fields({{"num_key_value_heads", &Config::kv_heads, 2},
                              {"head_dim", &Config::head_dim, 128},
                              {"rms_norm_eps", &Config::norm_eps, 1.5625e-7},
                              {"attention_bias", &Config::qkv_bias, true},
                              {"partial_rotary_factor", &Config::rotary_share, 0.5}}),
      .modules = {.gate = "mlp.gate_up_proj", .up = "mlp.gate_up_proj"},
      .published = {{"glm-4-9b", {151552, 4096, 40, 32, 2, 128, 13696, 131072, false}}}};
}

// As GLM, with norms also on the outputs of attention and MLP.
inline ModelFamily glm4() {
  ModelFamily f = glm();
  f.name = f.type = "glm4", f.architecture = "Glm4ForCausalLM";
  f.defaults.post_norms = true;
  f.modules.post_attention_norm = "post_self_attn_layernorm", f.modules.post_mlp_norm = "post_mlp_layernorm";
  f.published = {{"glm-4-9b-0414",  {151552, 4096, 40, 32, 2, 128, 13696, 32768, false}},
                 {"glm-4-32b-0414", {151552, 6144, 61, 48, 2, 128, 23040, 32768, false}, 0, {}, without_qkv_bias}};
  return f;
}

// As Llama, with factors of embeddings, scores, residuals and logits.
inline ModelFamily granite() {
  return {
      .name = "granite", .type = "granite", .architecture = "GraniteForCausalLM",
      .defaults = {.rope_theta = 1e7, .tied = true, .embedding_scale = 12, .logit_scale = 1.0 / 8,
                   .residual_scale = 0.22, .score_scale = 1.0 / 64},
      .fields = llama_fields({{"embedding_multiplier", &Config::embedding_scale, 1.0},
                              {"attention_multiplier", &Config::score_scale, 1.0},
                              {"residual_multiplier", &Config::residual_scale, 1.0},
                              {"logits_scaling", Inverse{&Config::logit_scale}, 1.0}}),
      .published = {{"granite-3.3-2b", {49159, 2048, 40, 32, 8,  64,  8192, 131072, true}},
                    {"granite-3.3-8b", {49159, 4096, 40, 32, 8, 128, 12800, 131072, true}, 0, {}, granite_8b}}};
}

// As Granite; attention has sinks, and three of four layers are local. A file can list RoPE's theta of each layer.
inline ModelFamily granite_swa() {
  ModelFamily f = granite();
  f.name = f.type = "granite_swa", f.architecture = "GraniteSWAForCausalLM";
  f.defaults.sinks = true, f.defaults.window = 128;
  f.fields = with_changes(f.fields, {{"rms_norm_eps", &Config::norm_eps, 1e-5}, {"num_key_value_heads", &Config::kv_heads, 4},
                                     {"tie_word_embeddings", &Config::tied, true}});
  f.local = LocalLayers::most, f.global_every = 4, f.global_first = true, f.usual_window = 128, f.theta_by_layer = true;
  f.published = {};
  return f;
}

// Granite 4 without experts and Mamba layers: as Granite; gate and up are one tensor in files.
inline ModelFamily granite_hybrid() {
  ModelFamily f = granite();
  f.name = f.type = "granitemoehybrid", f.architecture = "GraniteMoeHybridForCausalLM";
  f.fields = with_changes(f.fields, {
      {"intermediate_size", Ignored{}}, {"shared_intermediate_size", &Config::mlp}, {"mlp_bias", Only{}, false},
      {"num_local_experts", Needed{}, 0}, {"layer_types", AllOf{"full_attention"}, "attention"},
      {"position_embedding_type", Needed{}, "rope"}, {"normalization_function", Only{}, "rmsnorm"},
      {"num_experts_per_tok", Ignored{}}, {"output_router_logits", Ignored{}}, {"router_aux_loss_coef", Ignored{}},
      {"mamba_n_heads", Ignored{}}, {"mamba_n_groups", Ignored{}}, {"mamba_d_state", Ignored{}},
      {"mamba_d_head", Ignored{}}, {"mamba_d_conv", Ignored{}}, {"mamba_expand", Ignored{}},
      {"mamba_chunk_size", Ignored{}}, {"mamba_conv_bias", Ignored{}}, {"mamba_proj_bias", Ignored{}},
      {"time_step_limit", Ignored{}}, {"init_method", Ignored{}}});
  f.modules = {.gate = "shared_mlp.input_linear", .up = "shared_mlp.input_linear", .down = "shared_mlp.output_linear"};
  f.published = {{"granite-4.0-350m",  {100352, 1024, 28, 16, 4,  64, 2048,  32768, true}},
                 {"granite-4.0-1b",    {100352, 2048, 40, 16, 4, 128, 4096, 131072, true}},
                 {"granite-4.0-micro", {100352, 2560, 40, 40, 8,  64, 8192, 131072, true}}};
  return f;
}

// Attention and MLP have the same input, after a LayerNorm without bias; interleaved RoPE; logits are scaled.
inline ModelFamily cohere() {
  return {
      .name = "cohere", .type = "cohere", .architecture = "CohereForCausalLM",
      .defaults = {.norm = Norm::layer, .norm_bias = false, .parallel = true, .rope_theta = 5e5,
                   .rope_pairs = RopePairs::interleaved, .tied = true, .logit_scale = 0.0625},
      .fields = llama_fields({{"layer_norm_eps", &Config::norm_eps, 1e-5}, {"rms_norm_eps", Ignored{}},
                              {"logit_scale", &Config::logit_scale, 0.0625},
                              {"rope_theta", &Config::rope_theta, 5e5},
                              {"tie_word_embeddings", &Config::tied, true},
                              {"use_qk_norm", HasNorms{QkNorm::own_weights}, false}}),
      .published = {{"command-r",         {256000, 8192, 40, 64, 64, 128, 22528, 131072, true}, 8e6},
                    {"command-r-08-2024", {256000, 8192, 40, 64,  8, 128, 24576, 131072, true}, 4e6},
                    {"command-r-plus",    {256000, 12288, 64, 96, 8, 128, 33792, 131072, true}, 75e6, {}, command_r_plus},
                    {"aya-expanse-8b",    {256000, 4096, 32, 32,  8, 128, 14336,   8192, true}, 1e4, {}, logit_scale_8th}}};
}

// As Cohere; three of four layers are local, and only these have RoPE.
inline ModelFamily cohere2() {
  ModelFamily f = cohere();
  f.name = f.type = "cohere2", f.architecture = "Cohere2ForCausalLM";
  f.defaults.window = 4096;
  f.fields = with_changes(f.fields, {
      {"use_qk_norm", Only{}, false}, {"rope_theta", &Config::rope_theta, 1e4}, {"rotary_pct", Only{}, 1.0}, {"use_gated_activation", Only{}, true}, {"use_parallel_block", Only{}, true},
      {"use_parallel_embedding", Ignored{}}, {"use_embedding_sharing", Ignored{}}, {"layer_switch", Ignored{}},
      {"position_embedding_type", Only{}, "rope_gptj"}, {"order_of_interleaved_layers", Only{}, "local_attn_first"}});
  f.local = LocalLayers::most, f.global_every = 4, f.local_rope = true;
  f.published = {{"command-r7b", {256000,  4096, 32, 32, 8, 128, 14336, 132096, true}, 5e4, {}, logit_scale_4th},
                 {"command-a",   {256000, 12288, 64, 96, 8, 128, 36864, 131072, true}, 5e4, {}, logit_scale_4th}};
  return f;
}

// As Llama, with a norm of each head after RoPE.
inline ModelFamily hunyuan() {
  return {
      .name = "hunyuan", .type = "hunyuan_v1_dense", .architecture = "HunYuanDenseV1ForCausalLM",
      .defaults = {.qk_norm = QkNorm::heads_after_rope, .tied = true},
      .fields = llama_fields({{"rms_norm_eps", &Config::norm_eps, 1e-5},
                              {"use_qk_norm", Only{}, true}, {"use_cla", Only{}, false}, {"norm_type", Only{}, "rms"},
                              {"attention_head_dim", Ignored{}}, {"add_classification_head", Only{}, false},
                              {"cla_share_factor", Ignored{}}, {"class_num", Ignored{}}, {"org_vocab_size", Ignored{}},
                              {"pool_type", Ignored{}}, {"mask_init_id", Ignored{}}, {"dense_list", Ignored{}},
                              {"im_start_id", Ignored{}}, {"im_end_id", Ignored{}}, {"im_newline_id", Ignored{}},
                              {"text_start_id", Ignored{}}, {"text_end_id", Ignored{}}, {"pad_id", Ignored{}},
                              {"use_rotary_pos_emb", Only{}, true}}),
      .rope_alpha = true,
      .modules = {.q_norm = "self_attn.query_layernorm", .k_norm = "self_attn.key_layernorm"},
      .published = {{"hunyuan-0.5b", {120818, 1024, 24, 16, 8, 128,  3584, 262144, true}, kHunyuanTheta},
                    {"hunyuan-1.8b", {120818, 2048, 32, 16, 4, 128,  6144, 262144, true}, kHunyuanTheta},
                    {"hunyuan-4b",   {120818, 3072, 36, 32, 8, 128,  8192, 262144, true}, kHunyuanTheta},
                    {"hunyuan-7b",   {128167, 4096, 32, 32, 8, 128, 14336, 262144, true}, kHunyuanTheta}}};
}

// Norms have no weights. The embedding is normed, and so is each head after RoPE, which rotates by the negative angle. The
// MLP is relu² without a gate; logits are capped.
inline ModelFamily nanochat() {
  return {
      .name = "nanochat", .type = "nanochat", .architecture = "NanoChatForCausalLM",
      .defaults = {.norm_eps = 1e-6, .norm_weight = false, .rope_reversed = true, .mlp_kind = Mlp::relu2,
                   .qk_norm = QkNorm::heads_after_rope, .embedding_norm = true, .logit_cap = 15},
      .fields = llama_fields({{"final_logit_softcapping", OrNull{&Config::logit_cap}, 15.0},
                              {"logits_soft_cap", Only{}, 15.0}, {"qkv_bias", Only{}, false},  // of early files
                              {"hidden_act", Fixed{}, "relu2"}}),
      .modules = {.up = "mlp.fc1", .down = "mlp.fc2"},
      .published = {{"nanochat-d32", {65536, 2048, 32, 16, 16, 128, 8192, 2048, false}}}};
}

// clang-format on

}  // namespace streambp
