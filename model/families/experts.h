// Families with experts in place of dense feed-forwards.
#pragma once

#include "model/families/lfm2.h"
#include "model/families/qwen3_5.h"
#include "model/families/variants.h"

namespace streambp {

inline double active_width(const Config& c) { return static_cast<double>(c.experts_per_token * c.expert_mlp); }
inline double number_of_experts(const Config& c) { return static_cast<double>(c.experts); }

// Without dense layers, the width of the MLP is that of all experts of a token.
inline void experts(Config& c, Index all, Index chosen, Index width, Index shared = 0) {
  c.experts = all, c.experts_per_token = chosen, c.expert_mlp = width, c.shared_mlp = shared;
  if (c.dense_layers == 0) c.mlp = chosen * width;
}
inline void experts_128_of_768(Config& c) { experts(c, 128, 8, 768); }
inline void experts_128_of_1536(Config& c) { experts(c, 128, 8, 1536); }
inline void experts_8_of_14336(Config& c) { experts(c, 8, 2, 14336); }
inline void experts_8_of_16384(Config& c) { experts(c, 8, 2, 16384); }
inline void experts_64_of_1024(Config& c) { experts(c, 64, 8, 1024); }
inline void granite_1b(Config& c) { experts(c, 32, 8, 512), c.logit_scale = 1.0 / 6; }
inline void granite_3b(Config& c) { experts(c, 40, 8, 512), c.logit_scale = 1.0 / 6; }
inline void qwen3_next_80b(Config& c) { experts(c, 512, 10, 512, 512), delta_heads(c, 16, 32); }
inline void qwen3_5_35b(Config& c) { experts(c, 256, 8, 512, 512), delta_heads(c, 16, 32); }
inline void qwen3_5_122b(Config& c) { experts(c, 256, 8, 1024, 1024), delta_heads(c, 16, 64); }
inline void qwen3_5_397b(Config& c) { experts(c, 512, 10, 1024, 1024), delta_heads(c, 16, 64); }
inline void experts_32_of_2880(Config& c) { experts(c, 32, 4, 2880), c.mxfp4 = true; }
inline void experts_128_of_2880(Config& c) { experts(c, 128, 4, 2880), c.mxfp4 = true; }
// Its factor of cosines and sines is 0.1 log 32 + 1.
inline RopeScaling gpt_oss_rope() {
  return {.type = RopeType::yarn,
          .factor = 32,
          .original_length = 4096,
          .attention_factor = 1.3465735902799727,
          .ends = RopeScaling::Ends::exact};
}
inline void lfm2_8b(Config& c) {
  attention_in(c, {2, 6, 10, 14, 18, 21});
  c.dense_layers = 2;
  experts(c, 32, 4, 1792);
}

// clang-format off
// What all of them have in config.json. `count` and `width`: what the family calls them.
inline std::vector<Field> expert_fields(const char* count, Index experts, Index chosen, Field width) {
  return {{count, &Config::experts, experts}, {"num_experts_per_tok", &Config::experts_per_token, chosen}, width,
          {"output_router_logits", &Config::balanced, false}, {"router_aux_loss_coef", &Config::balance_factor, 0.001}};
}
inline std::vector<Field> with_experts(const std::vector<Field>& fields, const std::vector<Field>& experts, const std::vector<Field>& more = {}) {
  return with_changes(with_changes(fields, experts), more);
}

// Files have a tensor for each expert; transformers has one for all.
inline std::vector<StoredAs> apart() {
  return {{{"mlp.experts.%.gate_proj.weight", "mlp.experts.%.up_proj.weight"}, "mlp.experts.gate_up_proj"},
          {{"mlp.experts.%.down_proj.weight"}, "mlp.experts.down_proj"}};
}

inline ModelFamily qwen3_moe() {
  return {
      .name = "qwen3_moe", .type = "qwen3_moe", .architecture = "Qwen3MoeForCausalLM",
      .defaults = {.norm_eps = 1e-6, .rope_theta = 1e6, .qk_norm = QkNorm::heads, .experts = 8, .experts_per_token = 2,
                   .router_renormalised = true},
      .fields = with_experts(llama_fields(), expert_fields("num_local_experts", 128, 8, {"moe_intermediate_size", &Config::expert_mlp, 768}), {
          {"num_experts", &Config::experts, Formula{"num_local_experts", number_of_experts}},
          {"norm_topk_prob", &Config::router_renormalised, false},
          {"intermediate_size", Ignored{}}, {"", &Config::mlp, Formula{"num_experts_per_tok * moe_intermediate_size", active_width}},
          {"decoder_sparse_step", Only{}, 1}, {"mlp_only_layers", Empty{}},
          {"use_sliding_window", Only{}, false}, {"sliding_window", Ignored{}}}),
      .modules = {.others = apart()},
      //                                vocab hidden layers heads kv dim   mlp  length  tied
      .published = {{"qwen3-30b-a3b",   {151936, 2048, 48, 32, 4, 128, 0,  40960, false}, 0, {}, experts_128_of_768},
                    {"qwen3-235b-a22b", {151936, 4096, 94, 64, 4, 128, 0,  40960, false}, 0, {}, experts_128_of_1536}}};
}

// Qwen3.5 with experts, one of which is shared.
inline ModelFamily qwen3_5_moe() {
  ModelFamily f = qwen3_5();
  f.name = "qwen3_5_moe", f.type = "qwen3_5_moe_text", f.architecture = "Qwen3_5MoeForCausalLM";
  f.defaults.experts = 8, f.defaults.experts_per_token = 2, f.defaults.shared_mlp = 1, f.defaults.router_renormalised = true;
  f.fields = with_experts(f.fields, expert_fields("num_experts", 256, 8, {"moe_intermediate_size", &Config::expert_mlp, 512}), {
      {"hidden_size", &Config::hidden, 2048}, {"num_hidden_layers", &Config::layers, 40}, {"num_key_value_heads", &Config::kv_heads, 2},
      {"shared_expert_intermediate_size", &Config::shared_mlp, 512},
      {"intermediate_size", Ignored{}}, {"", &Config::mlp, Formula{"num_experts_per_tok * moe_intermediate_size", active_width}}});
  f.modules.others = apart();
  //                               vocab hidden layers heads kv  dim mlp length  tied
  f.published = {{"qwen3.5-35b-a3b",   {248320, 2048, 40, 16, 2, 256, 0, 262144, false}, 0, {}, qwen3_5_35b},
                 {"qwen3.5-122b-a10b", {248320, 3072, 48, 32, 2, 256, 0, 262144, false}, 0, {}, qwen3_5_122b},
                 {"qwen3.5-397b-a17b", {248320, 4096, 60, 32, 2, 256, 0, 262144, false}, 0, {}, qwen3_5_397b}};
  return f;
}

// As Qwen3.5-MoE; in files, the projections of a delta rule are two tensors.
inline ModelFamily qwen3_next() {
  ModelFamily f = qwen3_5_moe();
  f.name = f.type = "qwen3_next", f.architecture = "Qwen3NextForCausalLM";
  f.fields = with_changes(f.fields, {
      {"vocab_size", &Config::vocab, 151936}, {"num_hidden_layers", &Config::layers, 48}, {"num_experts", &Config::experts, 512},
      {"num_experts_per_tok", &Config::experts_per_token, 10}, {"norm_topk_prob", &Config::router_renormalised, true},
      {"", &Config::mlp, Formula{"num_experts_per_tok * moe_intermediate_size", active_width}},
      {"decoder_sparse_step", Only{}, 1}, {"mlp_only_layers", Empty{}}});
  Modules& m = f.modules;
  m.delta_q = m.delta_k = m.delta_v = m.z = "linear_attn.in_proj_qkvz", m.beta = m.decay = "linear_attn.in_proj_ba";
  f.published = {{"qwen3-next-80b-a3b", {151936, 2048, 48, 16, 2, 256, 0, 262144, false}, 0, {}, qwen3_next_80b}};
  return f;
}

inline ModelFamily mixtral() {
  return {
      .name = "mixtral", .type = "mixtral", .architecture = "MixtralForCausalLM",
      .defaults = {.rope_theta = 1e6, .experts = 8, .experts_per_token = 2, .router_renormalised = true},
      .fields = with_experts(llama_fields(), expert_fields("num_local_experts", 8, 2, {"intermediate_size", &Config::expert_mlp, 14336}), {
          {"rms_norm_eps", &Config::norm_eps, 1e-5}, {"router_jitter_noise", Only{}, 0.0}, {"sliding_window", Only{}, 0},
          {"", &Config::mlp, Formula{"num_experts_per_tok * intermediate_size", active_width}}}),
      .modules = {.others = {{{"block_sparse_moe.gate.weight"}, "mlp.gate.weight"},
                             {{"block_sparse_moe.experts.%.w1.weight", "block_sparse_moe.experts.%.w3.weight"}, "mlp.experts.gate_up_proj"},
                             {{"block_sparse_moe.experts.%.w2.weight"}, "mlp.experts.down_proj"}}},
      //                              vocab hidden layers heads kv dim mlp length tied
      .published = {{"mixtral-8x7b",  {32000, 4096, 32, 32, 8, 128, 0, 32768, false}, 0, {}, experts_8_of_14336},
                    {"mixtral-8x22b", {32000, 6144, 56, 48, 8, 128, 0, 65536, false}, 0, {}, experts_8_of_16384}}};
}

inline ModelFamily olmoe() {
  return {
      .name = "olmoe", .type = "olmoe", .architecture = "OlmoeForCausalLM",
      .defaults = {.qk_norm = QkNorm::all, .experts = 8, .experts_per_token = 2},
      .fields = with_experts(llama_fields(), expert_fields("num_experts", 64, 8, {"intermediate_size", &Config::expert_mlp, 2048}), {
          {"rms_norm_eps", &Config::norm_eps, 1e-5}, {"clip_qkv", Only{}, 0}, {"router_aux_loss_coef", &Config::balance_factor, 0.01},
          {"norm_topk_prob", &Config::router_renormalised, false},
          {"", &Config::mlp, Formula{"num_experts_per_tok * intermediate_size", active_width}}}),
      .modules = {.others = apart()},
      //                             vocab hidden layers heads kv dim mlp length tied
      .published = {{"olmoe-1b-7b", {50304, 2048, 16, 16, 16, 128, 0, 4096, false}, 0, {}, experts_64_of_1024}}};
}

inline ModelFamily granitemoe() {
  ModelFamily f = granite();
  f.name = f.type = "granitemoe", f.architecture = "GraniteMoeForCausalLM";
  f.defaults.experts = 8, f.defaults.experts_per_token = 2, f.defaults.router_renormalised = true;
  f.fields = with_experts(f.fields, expert_fields("num_local_experts", 8, 2, {"intermediate_size", &Config::expert_mlp, 11008}), {
      {"", &Config::mlp, Formula{"num_experts_per_tok * intermediate_size", active_width}}});
  f.modules = {.router = "block_sparse_moe.router", .experts_in = "block_sparse_moe.experts.gate_up_proj",
               .experts_out = "block_sparse_moe.experts.down_proj",
               .others = {{{"block_sparse_moe.router.layer.weight"}, "block_sparse_moe.router.weight"},
                          {{"block_sparse_moe.input_linear.weight"}, "block_sparse_moe.experts.gate_up_proj"},
                          {{"block_sparse_moe.output_linear.weight"}, "block_sparse_moe.experts.down_proj"}}};
  f.published = {{"granite-3.1-1b-a400m", {49155, 1024, 24, 16, 8, 64, 0, 131072, true}, 1.5e6, {}, granite_1b},
                 {"granite-3.1-3b-a800m", {49155, 1536, 32, 24, 8, 64, 0, 131072, true}, 1.5e6, {}, granite_3b}};
  return f;
}

// LFM2 with experts in all but the first layers. A bias takes part in the router's choice alone.
inline ModelFamily lfm2_moe() {
  ModelFamily f = lfm2();
  f.name = f.type = "lfm2_moe", f.architecture = "Lfm2MoeForCausalLM", f.adjusts_mlp = false;
  f.defaults.experts = 8, f.defaults.experts_per_token = 2, f.defaults.dense_layers = 2;
  f.defaults.router_kind = RouterKind::sigmoid, f.defaults.router_eps = 1e-6;
  f.defaults.router_renormalised = f.defaults.router_bias = true;
  f.fields = with_experts(f.fields, expert_fields("num_experts", 32, 4, {"moe_intermediate_size", &Config::expert_mlp, 1792}), {
      {"hidden_size", &Config::hidden, 2048}, {"intermediate_size", &Config::mlp, 7168},
      {"head_dim", &Config::head_dim, Formula{"hidden_size / num_attention_heads", hidden_per_head}},
      {"num_dense_layers", &Config::dense_layers, 2}, {"norm_topk_prob", &Config::router_renormalised, true},
      {"output_router_logits", Only{}, false}, {"router_aux_loss_coef", Ignored{}},
      {"use_expert_bias", &Config::router_bias, true}, {"routed_scaling_factor", &Config::router_scale, 1.0}});
  Modules& m = f.modules;
  m.router = "feed_forward.gate", m.router_bias = "feed_forward.expert_bias";
  m.experts_in = "feed_forward.experts.gate_up_proj", m.experts_out = "feed_forward.experts.down_proj";
  m.others = {{{"feed_forward.experts.%.w1.weight", "feed_forward.experts.%.w3.weight"}, m.experts_in},
              {{"feed_forward.experts.%.w2.weight"}, m.experts_out}};
  f.published = {{"lfm2-8b-a1b", {65536, 2048, 24, 32, 8, 64, 7168, 128000, true}, 1e6, {}, lfm2_8b}};
  return f;
}

// Attention with sinks, of which every second layer is local; experts and routers with biases, and an activation that cuts off.
inline ModelFamily gpt_oss() {
  return {
      .name = "gpt_oss", .type = "gpt_oss", .architecture = "GptOssForCausalLM",
      .defaults = {.rope_theta = 150000, .rope_scaling = gpt_oss_rope(), .mlp_kind = Mlp::clamped_swiglu, .qkv_bias = true,
                   .output_bias = true, .mlp_bias = true, .sinks = true, .window = 128, .experts = 8, .experts_per_token = 2,
                   .router_renormalised = true},
      .fields = with_experts(llama_fields(), expert_fields("num_local_experts", 128, 4, {"intermediate_size", &Config::expert_mlp, 2880}), {
          {"vocab_size", &Config::vocab, 201088}, {"hidden_size", &Config::hidden, 2880}, {"num_hidden_layers", &Config::layers, 36},
          {"num_attention_heads", &Config::heads, 64}, {"num_key_value_heads", &Config::kv_heads, 8}, {"head_dim", &Config::head_dim, 64},
          {"max_position_embeddings", &Config::max_length, 131072}, {"rms_norm_eps", &Config::norm_eps, 1e-5},
          {"rope_theta", &Config::rope_theta, 150000.0},
          {"attention_bias", &Config::output_bias, true}, {"attention_bias", &Config::qkv_bias, true}, {"mlp_bias", Only{}, true},
          {"swiglu_alpha", Only{}, 1.702}, {"swiglu_limit", Only{}, 7.0},
          {"experts_per_token", Ignored{}}, {"initial_context_length", Ignored{}},
          {"", &Config::mlp, Formula{"num_experts_per_tok * intermediate_size", active_width}}}),
      .local = LocalLayers::most, .global_every = 2, .usual_window = 128,
      .modules = {.router = "mlp.router", .experts_transposed = true, .experts_interleaved = true},
      //                             vocab hidden layers heads kv dim mlp length tied
      .published = {{"gpt-oss-20b",  {201088, 2880, 24, 64, 8, 64, 0, 131072, false}, 0, gpt_oss_rope(), experts_32_of_2880},
                    {"gpt-oss-120b", {201088, 2880, 36, 64, 8, 64, 0, 131072, false}, 0, gpt_oss_rope(), experts_128_of_2880}}};
}
// clang-format on

}  // namespace streambp
