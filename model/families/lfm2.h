// LFM2: most layers are gated short convolutions.
#pragma once

#include "model/families/llama_like.h"

namespace streambp {

inline void attention_in(Config& c, std::initializer_list<Index> layers) {
  c.mixers.assign(static_cast<std::size_t>(c.layers), MixerKind::convolution);
  for (const Index l : layers) c.mixers[static_cast<std::size_t>(l)] = MixerKind::attention;
}
inline void attention_of_16_layers(Config& c) { attention_in(c, {2, 5, 8, 10, 12, 14}); }
inline void attention_of_30_layers(Config& c) { attention_in(c, {2, 5, 9, 13, 17, 21, 24, 27}); }

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
      .attention_every = 3, .other_mixer = MixerKind::convolution, .other_type = "conv",
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
// clang-format on

}  // namespace streambp
