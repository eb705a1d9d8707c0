// OLMo Hybrid: most layers are gated delta rules, with norms of their inputs; the others are those of OLMo 2, without RoPE.
#pragma once

#include "model/families/llama_like.h"

namespace streambp {

// clang-format off
inline ModelFamily olmo_hybrid() {
  return {
      .name = "olmo_hybrid", .type = "olmo_hybrid", .architecture = "OlmoHybridForCausalLM",
      .defaults = {.norm_eps = 1e-6, .pre_norms = false, .post_norms = true, .norms_by_mixer = true,
                   .qk_norm = QkNorm::all, .convolution_width = 4, .doubles_beta = true, .output_norm_eps = 1e-5},
      .fields = llama_fields({{"linear_conv_kernel_dim", &Config::convolution_width, 4},
                              {"linear_allow_neg_eigval", &Config::doubles_beta, true},
                              {"linear_num_key_heads", &Config::delta_key_heads, Formula{"num_attention_heads", query_heads, true}},
                              {"linear_num_value_heads", &Config::delta_value_heads, Formula{"num_attention_heads", query_heads, true}},
                              {"linear_key_head_dim", &Config::delta_key_dim, Formula{"3/4 hidden_size / linear_num_key_heads", [](const Config& c) {
                                return std::floor(0.75 * static_cast<double>(c.hidden) / static_cast<double>(most(c.delta_key_heads, 1))); }, true}},
                              {"linear_value_head_dim", &Config::delta_value_dim, Formula{"2 linear_key_head_dim", [](const Config& c) {
                                return 2 * static_cast<double>(c.delta_key_dim); }, true}},
                              {"linear_a_log_min", Ignored{}}, {"linear_a_log_max", Ignored{}},  // of initial values
                              {"linear_use_gate", Only{}, true},
                              {"linear_dt_min", Ignored{}}, {"linear_dt_max", Ignored{}}, {"linear_dt_init_floor", Ignored{}}}),
      .attention_every = 4, .other_mixer = MixerKind::delta_rule, .other_type = "linear_attention", .attention_last = true,
      .rope_by_theta = true,
      .modules = {.post_attention_norm = "post_attention_layernorm", .post_mlp_norm = "post_feedforward_layernorm",
                  .convolution = "linear_attn.conv1d",
                  .delta_q = "linear_attn.q_proj", .delta_k = "linear_attn.k_proj", .delta_v = "linear_attn.v_proj",
                  .z = "linear_attn.g_proj", .beta = "linear_attn.b_proj", .decay = "linear_attn.a_proj",
                  .a_log = "linear_attn.A_log", .dt_bias = "linear_attn.dt_bias", .output_norm = "linear_attn.o_norm",
                  .delta_out = "linear_attn.o_proj",
                  .others = {{{"attention_layer_norm.weight"}, "input_layernorm.weight"},
                             {{"feedforward_layer_norm.weight"}, "post_attention_layernorm.weight"},
                             {{"linear_attn.q_conv1d.weight", "linear_attn.k_conv1d.weight", "linear_attn.v_conv1d.weight"}, "linear_attn.conv1d.weight"}}},
      //                               vocab hidden layers heads kv dim   mlp  length  tied
      .published = {{"olmo-hybrid-7b", {100352, 3840, 32, 30, 30, 128, 11008, 65536, false}}}};
}
// clang-format on

}  // namespace streambp
