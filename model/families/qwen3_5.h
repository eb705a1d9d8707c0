// Qwen3.5: most layers are gated delta rules; the output of attention has a gate.
#pragma once

#include "model/families/llama_like.h"

namespace streambp {

inline void delta_heads(Config& c, Index key_heads, Index value_heads) {
  c.delta_key_heads = key_heads, c.delta_value_heads = value_heads, c.delta_key_dim = c.delta_value_dim = 128;
}
inline void delta_of_16_16(Config& c) { delta_heads(c, 16, 16); }
inline void delta_of_16_32(Config& c) { delta_heads(c, 16, 32); }
inline void delta_of_16_48(Config& c) { delta_heads(c, 16, 48); }

// clang-format off
inline ModelFamily qwen3_5() {
  return {
      .name = "qwen3_5", .type = "qwen3_5_text", .architecture = "Qwen3_5ForCausalLM",
      .defaults = {.norm_eps = 1e-6, .norm_offset = 1, .rope_theta = 1e7, .rotary_share = 0.25,
                   .qk_norm = QkNorm::heads, .convolution_width = 4, .attention_gate = true},
      .fields = llama_fields({{"vocab_size", &Config::vocab, 248320},
                              {"hidden_size", &Config::hidden, 4096},
                              {"num_hidden_layers", &Config::layers, 32},
                              {"num_attention_heads", &Config::heads, 16},
                              {"num_key_value_heads", &Config::kv_heads, 4},
                              {"head_dim", &Config::head_dim, 256},
                              {"intermediate_size", &Config::mlp, 12288},
                              {"max_position_embeddings", &Config::max_length, 32768},
                              {"partial_rotary_factor", &Config::rotary_share, 0.25},
                              {"linear_conv_kernel_dim", &Config::convolution_width, 4},
                              {"linear_num_key_heads", &Config::delta_key_heads, 16},
                              {"linear_num_value_heads", &Config::delta_value_heads, 32},
                              {"linear_key_head_dim", &Config::delta_key_dim, 128},
                              {"linear_value_head_dim", &Config::delta_value_dim, 128},
                              {"attn_output_gate", Only{}, true},
                              {"output_gate_type", Either{"silu"}, "swish", Written::if_unusual},  // of the delta rule
                              {"mamba_ssm_dtype", Ignored{}}, {"mlp_only_layers", Ignored{}},
                              {"mtp_num_hidden_layers", Ignored{}}, {"mtp_use_dedicated_embeddings", Ignored{}}}),
      .attention_every = 4, .other_mixer = MixerKind::delta_rule, .other_type = "linear_attention",
      .modules = {.convolution = "linear_attn.conv1d",
                  .delta_q = "linear_attn.in_proj_qkv", .delta_k = "linear_attn.in_proj_qkv",
                  .delta_v = "linear_attn.in_proj_qkv", .z = "linear_attn.in_proj_z", .beta = "linear_attn.in_proj_b",
                  .decay = "linear_attn.in_proj_a", .a_log = "linear_attn.A_log", .dt_bias = "linear_attn.dt_bias",
                  .output_norm = "linear_attn.norm", .delta_out = "linear_attn.out_proj"},
      //                           vocab hidden layers heads kv  dim    mlp  length  tied
      .published = {{"qwen3.5-0.8b", {248320, 1024, 24,  8, 2, 256,  3584, 262144, true},  0, {}, delta_of_16_16},
                    {"qwen3.5-2b",   {248320, 2048, 24,  8, 2, 256,  6144, 262144, true},  0, {}, delta_of_16_16},
                    {"qwen3.5-4b",   {248320, 2560, 32, 16, 4, 256,  9216, 262144, true},  0, {}, delta_of_16_32},
                    {"qwen3.5-9b",   {248320, 4096, 32, 16, 4, 256, 12288, 262144, false}, 0, {}, delta_of_16_32},
                    {"qwen3.5-27b",  {248320, 5120, 64, 24, 4, 256, 17408, 262144, false}, 0, {}, delta_of_16_48}}};
}
// clang-format on

}  // namespace streambp
