#include "data/files/config.h"
#include "data/files/gguf_model.h"

namespace streambp {

namespace {

// Reads metadata of the model's architecture.
class Metadata {
 public:
  Metadata(const GgufFile& file)
      : fields_(file.metadata(), file.path().string()),
        architecture(fields_.get<std::string>("general.architecture")),
        file_(file) {}

  bool has(const std::string& key) const { return fields_.has(full(key).c_str()); }
  template <class V>
  V get(const std::string& key, std::optional<V> otherwise = {}) const {
    if (otherwise && !has(key)) return *otherwise;
    const V found = fields_.get<V>(full(key).c_str());
    if constexpr (std::is_same_v<V, double>)
      require(std::isfinite(found), file(), ": ", quote(full(key)), " is not a finite number");
    return found;
  }
  double positive(const std::string& key, std::optional<double> otherwise = {}) const {
    const auto found = get<double>(key, otherwise);
    require(found > 0, file(), ": ", quote(full(key)), " is ", found, ", which is not positive");
    return found;
  }
  // A number, or one for each layer.
  std::vector<Index> numbers(const std::string& key, Index layers, Index otherwise) const {
    if (!has(key)) return std::vector(static_cast<std::size_t>(layers), otherwise);
    const Json& value = fields_.at(full(key).c_str());
    if (!value.is_array()) return std::vector(static_cast<std::size_t>(layers), get<Index>(key));
    std::vector<Index> all;
    for (const Json& n : value) {
      require(n.is_number_integer() || n.is_boolean(), file(), ": ", quote(full(key)),
              " is not a list of whole numbers");
      all.push_back(n.is_boolean() ? n.get<bool>() : n.get<Index>());
    }
    require(std::ssize(all) >= layers, file(), ": ", quote(full(key)), " has ", all.size(), " values for ", layers,
            " layers");
    all.resize(static_cast<std::size_t>(layers));
    return all;
  }
  bool has_tensor(const std::string& name) const { return file_.tensors().contains(name); }
  // A tensor of some layer, by the end of its name.
  bool layers_have(const std::string& end) const {
    return std::ranges::any_of(file_.tensors(), [&](const auto& t) { return t.first.ends_with("." + end); });
  }
  std::vector<double> factors(const std::string& tensor) const {
    require(has_tensor(tensor), file(), ": has no tensor ", quote(tensor));
    const Tensor& t = file_.tensors().at(tensor);
    std::vector<double> values(static_cast<std::size_t>(t.count));
    read(t, values.data());
    for (const double x : values) require(std::isfinite(x) && x > 0, t.where, ": holds ", x, "; the file is damaged");
    return values;
  }
  const GgufFile& gguf() const { return file_; }
  std::string file() const { return file_.path().string(); }

 private:
  std::string full(const std::string& key) const { return architecture + "." + key; }
  const Fields fields_;

 public:
  const std::string architecture;

 private:
  const GgufFile& file_;
};

const GgufFamily& family_of(const Metadata& m) {
  const bool windows = m.get<Index>("attention.sliding_window", 0) > 0, experts = m.get<Index>("expert_count", 0) > 0;
  std::set<std::string> known;
  for (const GgufFamily& g : gguf_families()) {
    known.insert(g.architecture);
    if (m.architecture == g.architecture && (family_named(g.family).defaults.experts > 0) == experts &&
        (g.family != std::string("olmo2") || !windows))
      return g;
  }
  fail(m.file(), ": models of architecture ", quote(m.architecture),
       experts                          ? " with experts"
       : known.contains(m.architecture) ? " without experts"
                                        : "",
       " are not supported in GGUF files; ", join(known), " are");
}

void read_rope(const Metadata& m, Config& c) {
  c.rope_theta = m.positive("rope.freq_base", 1e4);
  if (c.local_rope_theta > 0 || m.has("rope.freq_base_swa")) c.local_rope_theta = m.positive("rope.freq_base_swa", 1e4);
  const bool wide = c.global_head_dim > 0;
  const auto turned = m.get<Index>("rope.dimension_count", wide ? c.global_head_dim : c.head_dim);
  if (!wide && turned != c.head_dim) c.rotary_share = static_cast<double>(turned) / static_cast<double>(c.head_dim);
  require(turned > 0, m.file(), ": rope.dimension_count is ", turned, ", which is not positive");
  const auto type = m.get<std::string>("rope.scaling.type", "linear");
  const char* const factor_key = m.has("rope.scaling.factor") ? "rope.scaling.factor" : "rope.scale_linear";
  const double factor = m.get<double>(factor_key, 1) == 0 ? 1 : m.positive(factor_key, 1);  // as llama.cpp
  RopeScaling& s = c.rope_scaling;
  const auto pairs = [&](const std::string& tensor) {
    const std::vector<double> factors = m.factors(tensor);
    require(std::ssize(factors) == c.rotary_dim() / 2, m.file(), ": ", tensor, " has ", factors.size(), " factors for ",
            c.rotary_dim() / 2, " pairs");
    return factors;
  };
  s.original_length = m.positive("rope.scaling.original_context_length", static_cast<double>(c.max_length));
  if (wide) {  // global layers turn the pairs that are not divided by 1e30
    const std::vector<double> factors = m.factors("rope_freqs.weight");
    require(2 * std::ssize(factors) == c.global_head_dim, m.file(), ": rope_freqs.weight has ", factors.size(),
            " factors for heads of ", c.global_head_dim);
    const auto share = static_cast<double>(std::ranges::count(factors, 1.0)) / static_cast<double>(factors.size());
    s = {.type = RopeType::proportional, .share = share};
  } else if (m.has_tensor("rope_factors_long.weight")) {
    s.type = RopeType::longrope;
    s.short_factors = pairs("rope_factors_short.weight"), s.long_factors = pairs("rope_factors_long.weight");
    s.attention_factor = m.get<double>("rope.scaling.attn_factor", 1);
  } else if (m.has_tensor("rope_freqs.weight")) {  // Llama 3's, with the same factors for all lengths
    s.type = RopeType::longrope, s.original_length = static_cast<double>(c.max_length);
    s.short_factors = s.long_factors = pairs("rope_freqs.weight"), s.attention_factor = 1;
  } else if (type == "linear" && factor != 1) {
    s = {RopeType::linear, factor};
  } else if (type == "yarn") {
    s.type = RopeType::yarn, s.factor = factor;
    s.beta_fast = m.positive("rope.scaling.yarn_beta_fast", 32);
    s.beta_slow = m.positive("rope.scaling.yarn_beta_slow", 1);
    const double log_factor = 0.1 * std::log(factor), scale = m.get<double>("rope.scaling.yarn_log_multiplier", 0);
    s.attention_factor = m.get<double>("rope.scaling.attn_factor", 1) * (1 + log_factor) / (1 + scale * log_factor);
    s.query_beta = m.get<double>("attention.temperature_scale", 0);
  } else {
    require(type == "none" || type == "linear", m.file(), ": RoPE scaling of type ", quote(type), " is not supported");
    s = {};
  }
}

void read_windows(const Metadata& m, const ModelFamily& family, Config& c) {
  const bool usual = c.family == std::string("gemma2") || c.family == std::string("gemma3");
  c.window = m.get<Index>("attention.sliding_window", usual ? 4096 : 0);
  if (c.window >= c.max_length && family.local != LocalLayers::most) c.window = 0;
  if (m.has("attention.sliding_window_pattern")) {
    c.local.clear();
    const bool list = m.gguf().metadata().at(m.architecture + ".attention.sliding_window_pattern").is_array();
    const Index period = list ? 0 : m.get<Index>("attention.sliding_window_pattern");
    if (list)
      for (const Index local : m.numbers("attention.sliding_window_pattern", c.layers, 0))
        c.local.push_back(local != 0);
    else if (period > 0)
      c.local = all_but_every_layer(period, c.layers);
  }
  if (c.window == 0) c.local.clear();
  if (family.local_rope) c.without_rope = c.window > 0 ? without(c.local) : std::vector<bool>();
  if (m.has("attention.rope_pattern")) {
    c.without_rope.clear();
    for (const Index turns : m.numbers("attention.rope_pattern", c.layers, 1)) c.without_rope.push_back(turns == 0);
    if (std::ranges::find(c.without_rope, true) == c.without_rope.end()) c.without_rope.clear();
  }
}

void read_mixers(const Metadata& m, const std::vector<Index>& kv_heads, Config& c) {
  if (std::string(c.family).starts_with("lfm2")) {
    c.convolution_width = m.get<Index>("shortconv.l_cache");
    for (std::size_t l = 0; l < kv_heads.size(); ++l)
      c.mixers[l] = kv_heads[l] > 0 ? MixerKind::attention : MixerKind::convolution;
  }
  if (!c.has_delta_rule()) return;
  c.convolution_width = m.get<Index>("ssm.conv_kernel");
  c.delta_key_heads = m.get<Index>("ssm.group_count"), c.delta_value_heads = m.get<Index>("ssm.time_step_rank");
  c.delta_key_dim = m.get<Index>("ssm.state_size");
  const auto values = m.get<Index>("ssm.inner_size");
  require(c.delta_value_heads > 0 && values % c.delta_value_heads == 0, m.file(), ": ssm.inner_size ", values,
          " is not a multiple of ssm.time_step_rank ", c.delta_value_heads);
  c.delta_value_dim = values / c.delta_value_heads;
  const auto every = m.get<Index>("full_attention_interval", 4);
  require(every > 0, m.file(), ": full_attention_interval must be positive");
  std::vector<Index> recurrent;
  for (const bool other : all_but_every_layer(every, c.layers)) recurrent.push_back(other);
  if (m.has("attention.recurrent_layers")) recurrent = m.numbers("attention.recurrent_layers", c.layers, 0);
  for (std::size_t l = 0; l < c.mixers.size(); ++l)
    c.mixers[l] = recurrent[l] != 0 ? MixerKind::delta_rule : MixerKind::attention;
}

void read_experts(const Metadata& m, Config& c) {
  c.dense_layers = m.get<Index>("leading_dense_block_count", 0);
  const auto all = m.get<Index>("expert_count"), chosen = m.get<Index>("expert_used_count"),
             width = m.get<Index>("expert_feed_forward_length", m.get<Index>("feed_forward_length", 0)),
             shared = c.shared_mlp > 0 ? m.get<Index>("expert_shared_feed_forward_length") : 0;
  for (const Index size : {all, chosen, width, shared + 1})
    require(size > 0 && size <= kLargestSize, m.file(), ": expert_count ", all, ", expert_used_count ", chosen,
            ", expert width ", width, ", shared expert width ", shared, ": a value is out of range");
  experts(c, all, chosen, width, shared);
}

// The heads of Gemma 4's global layers.
void read_global_heads(const Metadata& m, const std::vector<Index>& kv_heads, Config& c) {
  c.wide = without(c.local), c.global_head_dim = m.get<Index>("attention.key_length"), c.global_kv_heads = c.kv_heads;
  for (std::size_t l = 0; l < c.wide.size(); ++l)
    if (c.wide[l]) c.global_kv_heads = kv_heads[l];
  c.keys_are_values = false;
  for (Index l = 0; l < c.layers; ++l)
    c.keys_are_values = c.keys_are_values || !m.has_tensor("blk." + std::to_string(l) + ".attn_v.weight");
  require(
      m.get<Index>("embedding_length_per_layer_input", 0) == 0 && m.get<Index>("attention.shared_kv_layers", 0) == 0,
      m.file(),
      ": Gemma 4 E2B and E4B (per-layer embeddings, shared keys and values) are not supported; 12B and 31B are");
}

}  // namespace

Config gguf_config(const GgufFile& file) {
  const Metadata m(file);
  const auto kind = Fields(file.metadata(), m.file()).get<std::string>("general.type", "model");
  require(kind == "model", m.file(), ": is ", quote(kind), ", not a model");
  const GgufFamily& g = family_of(m);
  const ModelFamily& family = family_named(g.family);
  const auto embedding = file.tensors().find("token_embd.weight");
  require(embedding != file.tensors().end() && embedding->second.shape.size() == 2, m.file(),
          ": has no token_embd.weight; is it a vocabulary only?");
  const auto hidden = m.get<Index>("embedding_length"), blocks = m.get<Index>("block_count"),
             later = m.get<Index>("nextn_predict_layers", 0);  // predict more than the next token
  require(hidden > 0 && hidden <= kLargestSize && later >= 0 && blocks > later && blocks <= kMostLayers, m.file(), ": ",
          blocks, " layers of width ", hidden, " are not supported");
  const Index layers = blocks - later;
  const auto usual_mlp = m.get<Index>("expert_feed_forward_length", 0);
  const std::vector<Index> heads = m.numbers("attention.head_count", layers, 0),
                           kv_heads = m.numbers("attention.head_count_kv", layers, heads.front()),
                           mlp = m.numbers("feed_forward_length", layers, usual_mlp);
  for (const auto& [list, key] : {std::pair(&heads, "attention.head_count"), {&mlp, "feed_forward_length"}})
    require(std::ranges::all_of(*list, [&](Index n) { return n == list->front() && n > 0 && n <= kLargestSize; }),
            m.file(), ": ", key, " must be the same number for all layers");
  const char* const width = m.has("attention.key_length_swa") ? "attention.key_length_swa" : "attention.key_length";
  const auto kv = std::ranges::max(kv_heads), dim = m.get<Index>(width, hidden / heads.front()),
             length = m.get<Index>("context_length");
  for (const Index size : {kv, dim, length})
    require(size > 0 && size <= kLargestSize, m.file(), ": a size of ", size, " is not supported");
  Config c = make_config(g.family, {embedding->second.shape[0], hidden, layers, heads.front(), kv, dim, mlp.front(),
                                    length, !m.has_tensor("output.weight")});
  c.norm_eps = m.positive(c.norm == Norm::layer ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon");
  read_windows(m, family, c);
  read_mixers(m, kv_heads, c);
  if (c.experts > 0) read_experts(m, c);
  if (c.global_head_dim > 0) read_global_heads(m, kv_heads, c);
  if (c.positions == Positions::rope) read_rope(m, c);
  c.qkv_bias = m.layers_have("attn_q.bias") || m.layers_have("attn_qkv.bias");
  c.output_bias = m.layers_have("attn_output.bias");
  c.mlp_bias = m.layers_have("ffn_down.bias") || m.layers_have("ffn_down_exps.bias");
  if (c.family == std::string("cohere") && m.layers_have("attn_q_norm.weight")) c.qk_norm = QkNorm::own_weights;
  c.score_cap = m.get<double>("attn_logit_softcapping", 0), c.logit_cap = m.get<double>("final_logit_softcapping", 0);
  if (c.family == std::string("gemma2") && !m.has("attn_logit_softcapping")) c.score_cap = 50;
  if (c.family == std::string("gemma2") && !m.has("final_logit_softcapping")) c.logit_cap = 30;
  // llama.cpp knows Gemma's largest models by their layers.
  const bool by_width =
      (c.family == std::string("gemma2") && layers == 46) || (c.family == std::string("gemma3") && layers == 62);
  if (by_width) c.score_scale = 1 / std::sqrt(static_cast<double>(hidden) / static_cast<double>(c.heads));
  if (m.has("attention.scale")) c.score_scale = m.get<double>("attention.scale");
  if (m.has("embedding_scale")) c.embedding_scale = m.get<double>("embedding_scale");
  if (m.has("residual_scale")) c.residual_scale = m.get<double>("residual_scale");
  if (m.has("logit_scale")) c.logit_scale = m.get<double>("logit_scale");
  if (m.has("logit_scale") && std::string(c.family).starts_with("granite")) c.logit_scale = 1 / c.logit_scale;
  validate(c, m.file());
  return c;
}

}  // namespace streambp
