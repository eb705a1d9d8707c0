// LFM2 and LFM3: most layers are gated short convolutions.
#pragma once

#include "model/families/llama_like.h"

namespace streambp {

inline void attention_in(Config& c, std::initializer_list<Index> layers) {
  c.mixers.assign(static_cast<std::size_t>(c.layers), MixerKind::convolution);
  for (const Index l : layers) c.mixers[static_cast<std::size_t>(l)] = MixerKind::attention;
}
inline void attention_of_16_layers(Config& c) { attention_in(c, {2, 5, 8, 10, 12, 14}); }
inline void attention_of_30_layers(Config& c) { attention_in(c, {2, 5, 9, 13, 17, 21, 24, 27}); }

// Every second layer from the third on has attention, and every second of these is local.
inline void lfm3_layers(Config& c) {
  for (Index l = 0; l < c.layers; ++l) {
    c.mixers[static_cast<std::size_t>(l)] = l > 0 && l % 2 == 0 ? MixerKind::attention : MixerKind::convolution;
    c.local[static_cast<std::size_t>(l)] = l > 0 && l % 4 == 0;
  }
}

inline double tied_again(const Config& c) { return c.tied ? 1 : 0; }

// clang-format off
inline ModelFamily lfm2() {
  return {
      .name = "lfm2", .type = "lfm2", .architecture = "Lfm2ForCausalLM",
      .defaults = {.norm_eps = 1e-5, .rope_theta = 1e6, .qk_norm = QkNorm::heads, .tied = true},
      .fields = {{"vocab_size", &Config::vocab, 65536},
                 {"hidden_size", &Config::hidden, 2560},
                 {"num_hidden_layers", &Config::layers, 32},
                 {"num_attention_heads", &Config::heads, 32},
                 {"num_key_value_heads", &Config::kv_heads, 8},
                 {"head_dim", &Config::head_dim, Formula{"hidden_size / num_attention_heads", hidden_per_head}},
                 {"intermediate_size", &Config::mlp, 12288},
                 {"max_position_embeddings", &Config::max_length, 128000},
                 {"norm_eps", &Config::norm_eps, 1e-5},
                 {"rope_theta", &Config::rope_theta, 1e6},
                 {"tie_word_embeddings", &Config::tied, true},
                 {"conv_L_cache", &Config::convolution_width, 3},
                 {"conv_bias", Only{}, false}, {"block_use_swiglu", Only{}, true}, {"use_pos_enc", Only{}, true},
                 {"tie_embedding", &Config::tied, Formula{"tie_word_embeddings", tied_again}},
                 {"theta", Ignored{}},  // said again, as are these
                 {"num_layers", Ignored{}}, {"num_heads", Ignored{}}, {"block_dim", Ignored{}}, {"conv_dim", Ignored{}},
                 {"conv_dim_out", Ignored{}}, {"block_norm_eps", Ignored{}},
                 {"block_mlp_init_scale", Ignored{}}, {"block_out_init_scale", Ignored{}},
                 {"block_use_xavier_init", Ignored{}}, {"conv_use_xavier_init", Ignored{}}},
      .attention_every = 3, .other_mixer = MixerKind::convolution, .other_type = "conv", .adjusts_mlp = true,
      .modules = {.norm = "model.embedding_norm", .attention_norm = "operator_norm", .mlp_norm = "ffn_norm",
                  .o = "self_attn.out_proj", .q_norm = "self_attn.q_layernorm", .k_norm = "self_attn.k_layernorm",
                  .convolution_in = "conv.in_proj", .convolution = "conv.conv", .convolution_out = "conv.out_proj",
                  .gate = "feed_forward.w1", .up = "feed_forward.w3", .down = "feed_forward.w2"},
      //                         vocab hidden layers heads kv dim   mlp  length  tied
      .published = {{"lfm2.5-350m", {65536, 1024, 16, 16, 8, 64, 4608, 128000, true}, 1e6, {}, attention_of_16_layers},
                    {"lfm2.5-1.2b", {65536, 2048, 16, 32, 8, 64, 8192, 128000, true}, 1e6, {}, attention_of_16_layers},
                    {"lfm2-350m", {65536, 1024, 16, 16, 8, 64,  4608, 128000, true}, 1e6, {}, attention_of_16_layers},
                    {"lfm2-700m", {65536, 1536, 16, 24, 8, 64,  6912, 128000, true}, 1e6, {}, attention_of_16_layers},
                    {"lfm2-1.2b", {65536, 2048, 16, 32, 8, 64,  8192, 128000, true}, 1e6, {}, attention_of_16_layers},
                    {"lfm2-2.6b", {65536, 2048, 30, 32, 8, 64, 10752, 128000, true}, 1e6, {}, attention_of_30_layers}}};
}

// As LFM2, with norms of the outputs of both branches, gates of attention's heads, and half of attention's layers local, with
// their own theta.
inline ModelFamily lfm3() {
  ModelFamily f = lfm2();
  f.name = f.type = "lfm3", f.architecture = "Lfm3ForCausalLM", f.adjusts_mlp = false, f.attention_every = 2;
  Config& c = f.defaults;
  c.post_norms = c.attention_gate = c.gates_heads = true, c.convolution_width = 7, c.window = f.usual_window = 256;
  c.local_rope_theta = 1e4, c.rope_scaling = {.type = RopeType::proportional, .share = 0.5};
  f.local = LocalLayers::most, f.global_every = 4;
  f.fields = with_changes(f.fields, {
      {"vocab_size", &Config::vocab, 128000}, {"hidden_size", &Config::hidden, 2048}, {"num_hidden_layers", &Config::layers, 24},
      {"num_attention_heads", &Config::heads, 16}, {"num_key_value_heads", &Config::kv_heads, 4},
      {"head_dim", &Config::head_dim, 128}, {"intermediate_size", &Config::mlp, 7680},
      {"conv_L_cache", &Config::convolution_width, 7}, {"rope_theta", Ignored{}},
      {"use_sandwich_norm", Only{}, true}, {"use_attention_gate", Only{}, true}, {"attention_bias", Only{}, false}});
  Modules& m = f.modules;
  m.o = "self_attn.o_proj", m.q_norm = "self_attn.q_norm", m.k_norm = "self_attn.k_norm", m.attention_gate = "self_attn.g_proj";
  m.post_attention_norm = "post_operator_norm", m.post_mlp_norm = "post_ffn_norm";
  m.others = {{{"self_attn.gate_proj.weight"}, "self_attn.g_proj.weight"},  // and what it has in 4 bits
              {{"self_attn.gate_proj.weight.absmax"}, "self_attn.g_proj.weight.absmax"},
              {{"self_attn.gate_proj.weight.quant_map"}, "self_attn.g_proj.weight.quant_map"},
              {{"self_attn.gate_proj.weight.nested_absmax"}, "self_attn.g_proj.weight.nested_absmax"},
              {{"self_attn.gate_proj.weight.nested_quant_map"}, "self_attn.g_proj.weight.nested_quant_map"},
              {{"self_attn.gate_proj.weight.quant_state.bitsandbytes__nf4"}, "self_attn.g_proj.weight.quant_state.bitsandbytes__nf4"}};
  f.published = {{"lfm3-1.7b", {128000, 2048, 24, 16, 4, 128, 7680, 128000, true}, 1e6, c.rope_scaling, lfm3_layers}};
  return f;
}
// clang-format on

}  // namespace streambp
