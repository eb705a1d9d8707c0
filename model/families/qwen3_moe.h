// Qwen3 with a mixture of experts in every layer.
#pragma once

#include "model/families/llama_like.h"

namespace streambp {

inline void set_experts(Config& c, Index experts, Index chosen, Index width) {
  c.experts = experts, c.experts_per_token = chosen, c.expert_mlp = width, c.router_renormalised = true;
}
inline void experts_of_30b(Config& c) { set_experts(c, 128, 8, 768); }
inline void experts_of_235b(Config& c) { set_experts(c, 128, 8, 1536); }

// clang-format off
inline ModelFamily qwen3_moe() {
  return {
      .name = "qwen3_moe", .type = "qwen3_moe", .architecture = "Qwen3MoeForCausalLM",
      .defaults = {.norm_eps = 1e-6, .rope_theta = 1e6, .qk_norm = QkNorm::heads, .experts = 8, .experts_per_token = 2,
                   .router_renormalised = true},
      .fields = llama_fields({{"head_dim", &Config::head_dim, Formula{"hidden_size / num_attention_heads", hidden_per_head}},
                              {"intermediate_size", &Config::mlp, 6144},
                              {"num_experts", &Config::experts, 128},
                              {"num_experts_per_tok", &Config::experts_per_token, 8},
                              {"moe_intermediate_size", &Config::expert_mlp, 768},
                              {"norm_topk_prob", &Config::router_renormalised, false},
                              {"decoder_sparse_step", Only{}, 1},
                              {"use_sliding_window", Only{}, false}, {"sliding_window", Ignored{}}, {"max_window_layers", Ignored{}},
                              {"router_aux_loss_coef", Ignored{}}, {"output_router_logits", Only{}, false}}),
      .modules = {.router = "mlp.gate", .expert_gate = "mlp.experts.gate_up_proj", .expert_up = "mlp.experts.gate_up_proj",
                  .expert_down = "mlp.experts.down_proj"},
      //                                vocab hidden layers heads kv dim   mlp  length  tied
      .published = {{"qwen3-30b-a3b",   {151936, 2048, 48, 32, 4, 128,  6144,  40960, false}, 0, {}, experts_of_30b},
                    {"qwen3-235b-a22b", {151936, 4096, 94, 64, 4, 128, 12288,  40960, false}, 0, {}, experts_of_235b}}};
}
// clang-format on

}  // namespace streambp
