// The configuration of a model. Model families (families.h) differ in fields of Config, not in code paths.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "kernels/activation.cuh"
#include "kernels/attention_shape.h"
#include "kernels/base/blocks.cuh"
#include "kernels/norm.cuh"
#include "kernels/rope.cuh"
#include "kernels/router.cuh"
#include "kernels/short_convolution.cuh"

namespace streambp {

enum class Norm { rms, layer };
enum class Positions { learned, rope };

// A norm of queries and keys: of each head before or after RoPE, or before RoPE: of all heads together, or a LayerNorm of
// each head with its own weights.
enum class QkNorm { none, heads, heads_after_rope, all, own_weights };

// The part of a layer that mixes rows (model/mixer.h).
enum class MixerKind { attention, convolution, delta_rule };

// Layers of a kind have the same activations.
struct LayerKind {
  MixerKind mixer;
  bool experts;
  bool wide;  // with the heads of global layers
  auto operator<=>(const LayerKind&) const = default;
};

// How the weights of linear layers are stored: as they are, or in 4 bits (kernels/four_bits.cuh).
enum class Base { plain, nf4 };

// A low-rank adapter (LoRA) of a linear layer; see model/linear.h.
struct AdapterSize {
  Index rank = 0;
  double scale = 0;
  bool operator==(const AdapterSize&) const = default;
};

// The sizes of a mixture of experts: each row chooses some, of this width.
struct MixtureShape {
  Index experts, chosen, width;
  RouterStyle style;
};

struct Config {
  std::string family = "llama";
  // In a multimodal model: what the names of the text model's parameters begin with instead of "model.". Empty: a text
  // model.
  std::string root = {};
  Index vocab = 0, hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, mlp = 0;
  Index max_length = 0;  // rows of the learned position table; with RoPE, the context length of pretraining
  Norm norm = Norm::rms;
  double norm_eps = 1e-5, norm_offset = 0;
  bool norm_bias = true;        // of LayerNorm
  bool norm_weight = true;      // of all norms
  bool pre_norms = true;        // the inputs of attention and MLP are normalised
  bool post_norms = false;      // their outputs are normalised before they are added
  bool norms_by_mixer = false;  // layers without attention swap pre_norms and post_norms
  bool parallel = false;        // attention and MLP have the same input, and both outputs are added to it
  Positions positions = Positions::rope;
  double rope_theta = 10000;
  RopeScaling rope_scaling = {};
  RopePairs rope_pairs = RopePairs::halves;
  bool rope_reversed = false;           // rotates by the negative angle
  double rotary_share = 1;              // of the numbers of a head; the others are not rotated
  std::vector<bool> without_rope = {};  // without_rope[l]: layer l has no RoPE; empty: all have it
  Mlp mlp_kind = Mlp::swiglu;
  bool qkv_bias = false, output_bias = false;
  bool mlp_bias = false;  // with experts: of them, and of their router
  QkNorm qk_norm = QkNorm::none;
  bool tied = false;  // the head's weight is the token embedding
  double embedding_scale = 1, logit_scale = 1;
  bool embedding_norm = false;          // the input of the first layer is normalised
  double residual_scale = 1;            // of the outputs of attention and MLP
  double score_scale = 0;               // of attention; 0: 1 / √head_dim
  double score_cap = 0, logit_cap = 0;  // soft caps; 0: none
  bool sinks = false;                   // attention's softmax has a sink for each head
  // In local layers a token attends to itself and the window-1 tokens before it. 0: no layer is local.
  Index window = 0;
  std::vector<bool> local = {};  // local[l]: layer l is local; empty: all are
  double local_rope_theta = 0;   // RoPE theta of local layers, without scaling; 0: the same as in other layers
  std::vector<bool> wide = {};   // wide[l]: layer l has other heads, those of global layers; empty: none has
  Index global_head_dim = 0, global_kv_heads = 0;  // these heads
  bool value_norm = false;                         // values are normalised, without a weight
  bool keys_are_values = false;  // in global layers with other heads, values are keys before their norm
  bool layer_scale = false;      // a layer's output is multiplied by a number, which is not trained

  std::vector<MixerKind> mixers = {};  // of each layer; empty: attention
  Index convolution_width = 3;         // of short convolutions, and of those before a delta rule
  bool attention_gate = false;         // attention's output is multiplied by the sigmoid of a projection
  bool gates_heads = false;            // ... which has one number for each head
  // Of gated delta rules. Value heads share key heads in groups.
  Index delta_key_heads = 0, delta_value_heads = 0, delta_key_dim = 0, delta_value_dim = 0;
  bool doubles_beta = false;   // β is 2 sigmoid(b)
  double output_norm_eps = 0;  // of the norm of its output; 0: norm_eps

  // Mixtures of experts. 0: no layer has one. The first layers can be dense.
  Index experts = 0, experts_per_token = 0, expert_mlp = 0, dense_layers = 0;
  Index shared_mlp = 0;  // the width of the expert that all rows use; 0: none
  RouterKind router_kind = RouterKind::softmax;
  bool router_renormalised = false, router_bias = false;
  double router_eps = 0, router_scale = 1;
  bool balanced = false;  // with a loss that balances the use of experts, times this factor
  double balance_factor = 0.001;

  // What is trained: adapters always; other parameters if they are in this set, by name. Without a set: all of them.
  std::map<std::string, AdapterSize> adapters = {};  // by the name of the linear layer
  std::optional<std::set<std::string>> trained = {};
  Base base = Base::plain;
  bool plain_scales = false;  // of weights in 4 bits: without double quantisation
  bool mxfp4 = false;         // experts are in MXFP4 in files
  // Weights that stay as a GGUF file stores them: by the name of the tensor, and the part of it.
  std::map<std::pair<std::string, Index>, BlockType> blocks = {};

  bool operator==(const Config&) const = default;

  // Experts stay in MXFP4 in memory if none of their weights is trained; without a set, all are.
  bool keeps_mxfp4() const {
    const auto of_experts = [](const std::string& name) {
      return name.find(".experts.") != name.npos && !name.ends_with("_bias");
    };
    return mxfp4 && trained && std::ranges::none_of(*trained, of_experts);
  }
  bool in_4_bits() const { return base == Base::nf4 || keeps_mxfp4() || !blocks.empty(); }  // some weights, or all
  Index delta_key_width() const { return delta_key_heads * delta_key_dim; }
  Index delta_value_width() const { return delta_value_heads * delta_value_dim; }
  Index delta_width() const { return 2 * delta_key_width() + delta_value_width(); }  // of queries, keys and values
  bool has_delta_rule() const { return std::ranges::find(mixers, MixerKind::delta_rule) != mixers.end(); }
  Index rotary_dim() const { return static_cast<Index>(static_cast<double>(head_dim) * rotary_share); }
  bool is_wide(Index layer) const { return !wide.empty() && wide[static_cast<std::size_t>(layer)]; }
  bool has_local_rope(Index layer) const { return wide.empty() ? is_local(layer) : !is_wide(layer); }
  bool has_values(Index layer) const { return !(keys_are_values && is_wide(layer)); }  // of their own
  bool has_experts(Index layer) const { return experts > 0 && layer >= dense_layers; }
  double balance() const { return balanced ? balance_factor : 0; }
  MixtureShape routed() const {
    return {experts, experts_per_token, expert_mlp, {router_kind, router_renormalised, router_eps, router_scale}};
  }
  MixtureShape shared() const { return {1, 1, shared_mlp, {.kind = RouterKind::sigmoid}}; }
  bool gated() const { return mlp_kind != Mlp::gelu && mlp_kind != Mlp::relu2; }
  bool has_qk_norm() const { return qk_norm != QkNorm::none; }
  bool is_local(Index layer) const { return window > 0 && (local.empty() || local[static_cast<std::size_t>(layer)]); }
  bool has_rope(Index layer) const {
    return positions == Positions::rope && (without_rope.empty() || !without_rope[static_cast<std::size_t>(layer)]);
  }
  // A model of this layer alone.
  Config only(Index layer) const {
    Config one = *this;
    one.layers = 1, one.local = {is_local(layer)}, one.dense_layers = 0;
    if (!has_experts(layer)) one.experts = 0;
    if (!mixers.empty()) one.mixers = {mixer(layer)};
    if (!wide.empty()) one.wide = {is_wide(layer)};
    if (!without_rope.empty()) one.without_rope = {without_rope[static_cast<std::size_t>(layer)]};
    return one;
  }
  MixerKind mixer(Index layer) const {
    return mixers.empty() ? MixerKind::attention : mixers[static_cast<std::size_t>(layer)];
  }
  LayerKind kind(Index layer) const { return {mixer(layer), has_experts(layer), is_wide(layer)}; }
  bool swaps_norms(Index layer) const { return norms_by_mixer && mixer(layer) != MixerKind::attention; }
  bool has_pre_norms(Index layer) const { return pre_norms != swaps_norms(layer); }
  bool has_post_norms(Index layer) const { return post_norms != swaps_norms(layer); }
  NormStyle norm_style() const { return {.eps = norm_eps, .centered = norm == Norm::layer, .offset = norm_offset}; }
  NormStyle head_norm_style() const {
    return {.eps = norm_eps, .centered = qk_norm == QkNorm::own_weights, .offset = norm_offset};
  }
  AttentionShape attention(Index layer) const {
    const bool wide = is_wide(layer);
    return {.heads = heads,
            .kv_heads = wide ? global_kv_heads : kv_heads,
            .head_dim = wide ? global_head_dim : head_dim,
            .window = is_local(layer) ? window : 0,
            .score_scale = score_scale,
            .score_cap = score_cap};
  }
};

// The model with logits that are divided by this number, after their cap.
inline Config with_temperature(Config c, double temperature) {
  c.logit_scale /= temperature, c.logit_cap /= temperature;
  return c;
}

// Limits what a malicious config file can make us allocate, and sizes of tensors that could overflow. Far above any real
// model.
constexpr Index kMostLayers = 1 << 12, kLargestSize = 1 << 24;

// What the attention kernels hold of a head, on CPUs and GPUs.
constexpr Index kMostHeadDim = 512, kMostGroup = 256;
constexpr Index kMostExperts = 1 << 10;
constexpr Index kMostDelta = 256;  // heads of a delta rule, and their width

// Refuses unsupported sizes, with messages for the user.
inline void validate(const Config& c) {
  require(c.vocab > 0 && c.hidden > 0 && c.layers > 0 && c.heads > 0 && c.kv_heads > 0 && c.head_dim > 0 && c.mlp > 0,
          "model: vocabulary, hidden, layers, heads, kv-heads, head-dim and mlp must all be positive");
  require(c.layers <= kMostLayers, "model: ", c.layers, " layers are more than the ", kMostLayers,
          " that are supported");
  for (Index size : {c.vocab, c.hidden, c.heads, c.kv_heads, c.head_dim, c.mlp, c.max_length, c.window}) {
    require(size <= kLargestSize, "model: a size of ", size, " is more than the ", kLargestSize, " that are supported");
  }
  for (const Index dim : {c.head_dim, c.global_head_dim})
    require(dim <= kMostHeadDim, "model: heads of width ", dim, " are wider than the ", kMostHeadDim,
            " that attention supports");
  require(c.wide.empty() || (c.global_head_dim > 0 && c.global_head_dim % 2 == 0 && c.global_kv_heads > 0 &&
                             c.heads % c.global_kv_heads == 0),
          "model: ", c.heads, " query heads of global layers cannot share ", c.global_kv_heads,
          " key/value heads of width ", c.global_head_dim);
  require(c.rope_scaling.share > 0 && c.rope_scaling.share <= 1,
          "model: RoPE turns a share of a head, from 0 to 1, not ", c.rope_scaling.share);
  require(!c.value_norm || c.qk_norm == QkNorm::heads,
          "model: a norm of values needs one of each head's queries and keys");
  require(!c.keys_are_values || c.value_norm, "model: values that are keys need a norm");
  require(c.heads <= kLargestSize / c.head_dim, "model: ", c.heads, " heads of ", c.head_dim, " are too wide");
  const auto real = [](Index n) { return static_cast<double>(n); };
  const double linear = real(c.hidden) * (2 * real(c.heads) * real(c.head_dim) + 3 * real(c.mlp)),
               weights = real(c.layers) * linear + 2 * real(c.vocab) * real(c.hidden);
  require(weights < 0x1p46, "model: ", weights, " weights are too many; are its sizes right?");
  require(c.heads % c.kv_heads == 0, "model: ", c.heads, " query heads cannot share ", c.kv_heads,
          " key/value heads evenly; choose kv-heads that divides heads");
  require(c.heads / c.kv_heads <= kMostGroup, "model: ", c.heads / c.kv_heads,
          " query heads share a key/value head, more than the ", kMostGroup, " that attention supports");
  const Index rotated = c.rotary_share > 0 && c.rotary_share <= 1 ? c.rotary_dim() : 0;
  require(c.positions == Positions::learned || (c.head_dim % 2 == 0 && rotated % 2 == 0),
          "model: RoPE rotates pairs of numbers, so head-dim and its rotated part must be even, not ", c.head_dim,
          " and ", rotated);
  require(c.positions == Positions::learned || rotated > 0, "model: RoPE must rotate 2 numbers of a head or more, not ",
          c.rotary_share, " of ", c.head_dim, "; choose a larger head-dim");
  require(c.positions == Positions::rope || c.max_length > 0,
          "model: learned positions need a positive maximum length");
  require(c.mixers.empty() || static_cast<Index>(c.mixers.size()) == c.layers, "model: ", c.mixers.size(),
          " layers have a mixer, but the model has ", c.layers);
  require(c.convolution_width >= 2 && c.convolution_width <= kMostTaps, "model: short convolutions of width ",
          c.convolution_width, " are not supported; 2 to ", kMostTaps, " are");
  if (c.has_delta_rule()) {
    for (const auto& [n, what] : {std::pair(c.delta_key_heads, "key heads"),
                                  {c.delta_value_heads, "value heads"},
                                  {c.delta_key_dim, "numbers in a key"},
                                  {c.delta_value_dim, "numbers in a value"}})
      require(n > 0 && n <= kMostDelta, "model: a delta rule cannot have ", n, " ", what, "; 1 to ", kMostDelta,
              " are supported");
    require(c.delta_value_heads % c.delta_key_heads == 0, "model: ", c.delta_value_heads,
            " value heads of a delta rule cannot share ", c.delta_key_heads, " key heads evenly");
  }
  if (c.experts > 0) {
    require(c.experts <= kMostExperts && c.experts_per_token > 0 && c.experts_per_token <= c.experts,
            "model: a token cannot choose ", c.experts_per_token, " of ", c.experts, " experts; at most ", kMostExperts,
            " are supported");
    require(c.expert_mlp > 0 && c.expert_mlp <= kLargestSize, "model: experts of width ", c.expert_mlp,
            " are not supported");
    require(c.gated(), "model: experts have gates");
    require(!c.mlp_bias || (c.shared_mlp == 0 && c.dense_layers == 0),
            "model: experts that have biases are all routed, and in all layers");
    require(c.dense_layers >= 0 && c.dense_layers < c.layers, "model: of ", c.layers, " layers, the first ",
            c.dense_layers, " cannot be dense and others have experts");
    require(c.router_scale > 0, "model: the scale of a router must be positive");
    require(c.balance_factor >= 0, "model: the loss that balances experts cannot have the weight ", c.balance_factor);
  }
  require(c.window >= 0, "model: the attention window must not be negative");
  require(c.norm_eps > 0 && c.output_norm_eps >= 0 && c.rope_theta > 0 && c.local_rope_theta >= 0,
          "model: norm epsilon and rope theta must be positive");
  const RopeScaling& rope = c.rope_scaling;
  require(rope.type != RopeType::yarn || c.rope_theta > 1, "model: YaRN needs a rope theta above 1");
  require(rope.type != RopeType::dynamic || rotated > 2, "model: dynamic NTK needs heads wider than 2");
  for (const auto* factors : {&rope.short_factors, &rope.long_factors}) {
    require(rope.type != RopeType::longrope || static_cast<Index>(factors->size()) == rotated / 2,
            "model: longrope needs a factor for each of the ", rotated / 2, " pairs of a head, not ", factors->size());
  }
  require(c.embedding_scale > 0 && c.score_scale >= 0 && c.residual_scale > 0 && c.logit_scale > 0,
          "model: the scales of embedding, attention, residuals and logits must be positive");
  constexpr double kLargestCap = 1000;  // rounding errors grow with the cap
  require(c.score_cap >= 0 && c.logit_cap >= 0 && c.score_cap <= kLargestCap && c.logit_cap <= kLargestCap,
          "model: the soft caps of scores and logits must be between 0 (none) and ", kLargestCap);
  require(c.norm_weight || c.qk_norm != QkNorm::heads, "model: norms of heads before RoPE must have weights");
  require(!c.embedding_norm || c.positions == Positions::rope, "model: learned positions follow a norm of embeddings");
  for (const double scale : {c.embedding_scale, c.score_scale, c.residual_scale, c.logit_scale, c.rope_theta})
    require(std::isfinite(scale), "model: a scale or RoPE's theta is not finite");
  require(c.local.empty() || static_cast<Index>(c.local.size()) == c.layers, "model: ", c.local.size(),
          " layers are marked local or global, but the model has ", c.layers);
  require(c.without_rope.empty() || static_cast<Index>(c.without_rope.size()) == c.layers,
          "model: ", c.without_rope.size(), " layers are marked with or without RoPE, but the model has ", c.layers);
}

}  // namespace streambp
