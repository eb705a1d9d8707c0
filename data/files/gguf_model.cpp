#include "data/files/gguf_model.h"

#include <mutex>

#include "data/files/config.h"

namespace streambp {

namespace {

// clang-format off
constexpr GgufFamily kFamilies[] = {
    {"llama", "llama", true},   {"mistral3", "ministral3", true}, {"smollm3", "smollm3", true}, {"arcee", "arcee", true},
    {"granite", "granite", true}, {"granite_swa", "granite_swa", true},
    {"qwen2", "qwen2"}, {"qwen3", "qwen3"}, {"phi3", "phi3"}, {"starcoder2", "starcoder2"}, {"ernie4_5", "ernie4_5"},
    {"seed_oss", "seed_oss", false, false, "post_attention_norm"},
    {"gemma", "gemma", false, true}, {"gemma2", "gemma2", false, true, "post_attention_norm"},
    {"gemma3", "gemma3", false, true, "post_attention_norm"}, {"gemma4", "gemma4", false, false, "post_attention_norm"},
    {"olmo2", "olmo2", false, false, "post_attention_norm"}, {"olmo2", "olmo3", false, false, "post_attention_norm"},
    {"exaone4", "exaone4", false, false, "post_attention_norm"}, {"glm4", "glm4"},
    {"command-r", "cohere"}, {"cohere2", "cohere2"}, {"hunyuan-dense", "hunyuan"}, {"lfm2", "lfm2"},
    {"qwen35", "qwen3_5", false, true, "post_attention_norm"},
    {"llama", "mixtral", true}, {"qwen3moe", "qwen3_moe"}, {"olmoe", "olmoe"}, {"granitemoe", "granitemoe", true},
    {"lfm2moe", "lfm2_moe"}, {"qwen35moe", "qwen3_5_moe", false, true, "post_attention_norm"}};

// Modules of a layer: of Hugging Face, and of llama.cpp.
constexpr std::pair<const char*, const char*> kModules[] = {
    {"input_layernorm", "attn_norm"}, {"operator_norm", "attn_norm"}, {"pre_feedforward_layernorm", "ffn_norm"},
    {"post_feedforward_layernorm", "post_ffw_norm"}, {"post_self_attn_layernorm", "post_attention_norm"},
    {"post_mlp_layernorm", "post_ffw_norm"}, {"ffn_norm", "ffn_norm"},
    {"self_attn.q_proj", "attn_q"}, {"self_attn.k_proj", "attn_k"}, {"self_attn.v_proj", "attn_v"},
    {"self_attn.qkv_proj", "attn_qkv"}, {"self_attn.o_proj", "attn_output"}, {"self_attn.out_proj", "attn_output"},
    {"self_attn.q_norm", "attn_q_norm"}, {"self_attn.k_norm", "attn_k_norm"},
    {"self_attn.query_layernorm", "attn_q_norm"}, {"self_attn.key_layernorm", "attn_k_norm"},
    {"self_attn.q_layernorm", "attn_q_norm"}, {"self_attn.k_layernorm", "attn_k_norm"},
    {"self_attn.sinks", "attn_sinks.weight"}, {"layer_scalar", "layer_output_scale.weight"},
    {"mlp.gate_proj", "ffn_gate"}, {"mlp.up_proj", "ffn_up"}, {"mlp.down_proj", "ffn_down"},
    {"mlp.gate_up_proj", "ffn_up"}, {"mlp.c_fc", "ffn_up"}, {"mlp.c_proj", "ffn_down"},
    {"feed_forward.w1", "ffn_gate"}, {"feed_forward.w3", "ffn_up"}, {"feed_forward.w2", "ffn_down"},
    {"mlp.gate", "ffn_gate_inp"}, {"block_sparse_moe.router", "ffn_gate_inp"}, {"feed_forward.gate", "ffn_gate_inp"},
    {"feed_forward.expert_bias", "exp_probs_b.bias"}, {"mlp.shared_expert_gate", "ffn_gate_inp_shexp"},
    {"mlp.shared_expert.gate_proj", "ffn_gate_shexp"}, {"mlp.shared_expert.up_proj", "ffn_up_shexp"},
    {"mlp.shared_expert.down_proj", "ffn_down_shexp"},
    {"conv.in_proj", "shortconv.in_proj"}, {"conv.conv", "shortconv.conv"}, {"conv.out_proj", "shortconv.out_proj"},
    {"linear_attn.in_proj_qkv", "attn_qkv"}, {"linear_attn.in_proj_z", "attn_gate"},
    {"linear_attn.in_proj_b", "ssm_beta"}, {"linear_attn.in_proj_a", "ssm_alpha"}, {"linear_attn.conv1d", "ssm_conv1d"},
    {"linear_attn.A_log", "ssm_a"}, {"linear_attn.dt_bias", "ssm_dt.bias"}, {"linear_attn.norm", "ssm_norm"},
    {"linear_attn.out_proj", "ssm_out"}};
// clang-format on

// The rest of a name after a module, or nothing if it is another one.
std::optional<std::string> after(const std::string& name, const std::string& module) {
  if (name == module) return "";
  if (name.starts_with(module + ".")) return name.substr(module.size());
  return {};
}

}  // namespace

const GgufFamily* gguf_family(const std::string& family) {
  const auto found = std::ranges::find(kFamilies, family, [](const GgufFamily& g) { return std::string(g.family); });
  return found == std::end(kFamilies) ? nullptr : found;
}

GgufName gguf_name(const Config& c, const Parameter& p) {
  const GgufFamily& g = *gguf_family(c.family);
  const Modules& names = family_of(c).modules;
  GgufName found;
  const std::string layers = names.layers;
  if (!p.name.starts_with(layers)) {
    for (const auto& [module, name] :
         {std::pair(names.tokens, "token_embd"),
          {names.norm, std::string(c.family).starts_with("lfm2") ? "token_embd_norm" : "output_norm"},
          {"lm_head", "output"}})
      if (const auto rest = after(p.name, module)) found.name = name + *rest;
  } else {
    const std::size_t dot = p.name.find('.', layers.size());
    const std::string layer = "blk." + p.name.substr(layers.size(), dot + 1 - layers.size()),
                      tail = p.name.substr(dot + 1);
    if (const auto rest = after(tail, "post_attention_layernorm")) found.name = layer + g.second_norm + *rest;
    for (const auto& [module, name] : kModules)
      if (const auto rest = after(tail, module)) found.name = layer + name + *rest;
    if (tail == names.experts_in) found.name = layer + (p.part == 0 ? "ffn_gate_exps.weight" : "ffn_up_exps.weight");
    if (tail == names.experts_out) found.name = layer + "ffn_down_exps.weight";
    const auto is = [&](const char* module) { return after(tail, module).has_value(); };
    if (g.permuted && (is("self_attn.q_proj") || is("self_attn.k_proj"))) found.rows = {2, c.head_dim / 2};
    const Index keys = c.delta_key_heads, group = c.delta_value_heads / most(keys, 1), dim = c.delta_value_dim;
    if (is("linear_attn.in_proj_qkv") || is("linear_attn.conv1d"))
      found.rows = {keys, group, dim, 2 * c.delta_key_width()};
    if (is("linear_attn.in_proj_z")) found.rows = {keys, group, dim};
    if (is("linear_attn.in_proj_a") || is("linear_attn.in_proj_b") || is("linear_attn.A_log") ||
        is("linear_attn.dt_bias"))
      found.rows = {keys, group};
    if (is("linear_attn.out_proj")) found.columns = {keys, group, dim};
    if (is("linear_attn.A_log")) found.change = ValueChange::log_of_negative;
  }
  require(!found.name.empty(), p.name, ": has no name in GGUF files");
  if (g.added_one && p.name.ends_with("norm.weight") && !p.name.ends_with("linear_attn.norm.weight"))
    found.change = ValueChange::minus_one;
  return found;
}

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
    return fields_.get<V>(full(key).c_str());
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
  for (const GgufFamily& g : kFamilies) {
    known.insert(g.architecture);
    if (m.architecture == g.architecture && (family_named(g.family).defaults.experts > 0) == experts &&
        (g.family != std::string("olmo2") || !windows))
      return g;
  }
  fail(m.file(), ": models of architecture ", quote(m.architecture), experts ? " with experts" : "",
       " are not supported in GGUF files; ", join(known), " are");
}

void read_rope(const Metadata& m, Config& c) {
  c.rope_theta = m.get<double>("rope.freq_base", 1e4);
  if (c.local_rope_theta > 0 || m.has("rope.freq_base_swa"))
    c.local_rope_theta = m.get<double>("rope.freq_base_swa", 1e4);
  const bool wide = c.global_head_dim > 0;
  const auto turned = m.get<Index>("rope.dimension_count", wide ? c.global_head_dim : c.head_dim);
  if (!wide && turned != c.head_dim) c.rotary_share = static_cast<double>(turned) / static_cast<double>(c.head_dim);
  const auto type = m.get<std::string>("rope.scaling.type", "none");
  const auto factor = m.get<double>("rope.scaling.factor", 1);
  RopeScaling& s = c.rope_scaling;
  const auto pairs = [&](const std::string& tensor) {
    const std::vector<double> factors = m.factors(tensor);
    require(std::ssize(factors) == c.rotary_dim() / 2, m.file(), ": ", tensor, " has ", factors.size(), " factors for ",
            c.rotary_dim() / 2, " pairs");
    return factors;
  };
  s.original_length = m.get<double>("rope.scaling.original_context_length", static_cast<double>(c.max_length));
  if (wide) {  // global layers turn the pairs that are not divided by 1e30
    const std::vector<double> factors = m.factors("rope_freqs.weight");
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
    s.beta_fast = m.get<double>("rope.scaling.yarn_beta_fast", 32),
    s.beta_slow = m.get<double>("rope.scaling.yarn_beta_slow", 1);
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
  c.delta_key_dim = c.delta_value_dim = m.get<Index>("ssm.state_size");
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

// The tables of the file's tensors: it has gate and up of experts in two tensors.
std::vector<Table<float>> apart(const Table<float>& parts) {
  if (parts.front().parameter.experts == 0) return {1, parts};
  std::vector<Table<float>> each;
  for (const Entry<float>& e : parts) each.push_back({e});
  return each;
}
// Joins gate and up to one tensor, as Hugging Face stores them: gate and up of the first expert, of the second, and so on.
Tensor expert_by_expert(const std::vector<Tensor>& tensors, const std::vector<Index>& shape) {
  Tensor all = tensors.front();
  const Index experts = shape[0];
  for (Index e = 0; e < experts; ++e) {
    for (Tensor piece : tensors) {
      piece.bytes /= static_cast<std::size_t>(experts), piece.data += static_cast<std::size_t>(e) * piece.bytes;
      piece.shape.erase(piece.shape.begin()), piece.count /= experts;
      all.pieces.push_back(piece);
    }
  }
  all.shape = shape, all.count *= std::ssize(tensors), all.bytes *= tensors.size(), all.data = nullptr;
  return all;
}

Config config_of(const GgufFile& file) {
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
  c.norm_eps =
      m.get<double>(c.norm == Norm::layer ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon");
  read_windows(m, family, c);
  read_mixers(m, kv_heads, c);
  if (c.experts > 0) read_experts(m, c);
  if (c.global_head_dim > 0) read_global_heads(m, kv_heads, c);
  read_rope(m, c);
  c.qkv_bias = m.layers_have("attn_q.bias") || m.layers_have("attn_qkv.bias");
  c.output_bias = m.layers_have("attn_output.bias"), c.mlp_bias = m.layers_have("ffn_down.bias");
  if (c.family == std::string("cohere") && m.layers_have("attn_q_norm.weight")) c.qk_norm = QkNorm::own_weights;
  c.score_cap = m.get<double>("attn_logit_softcapping", 0), c.logit_cap = m.get<double>("final_logit_softcapping", 0);
  if (c.family == std::string("gemma2") && !m.has("attn_logit_softcapping")) c.score_cap = 50;
  // llama.cpp knows Gemma's largest models by their layers.
  const bool by_width =
      (c.family == std::string("gemma2") && layers == 46) || (c.family == std::string("gemma3") && layers == 62);
  if (by_width) c.score_scale = 1 / std::sqrt(static_cast<double>(hidden) / static_cast<double>(c.heads));
  if (m.has("attention.scale")) c.score_scale = m.get<double>("attention.scale");
  if (m.has("embedding_scale")) c.embedding_scale = m.get<double>("embedding_scale");
  if (m.has("residual_scale")) c.residual_scale = m.get<double>("residual_scale");
  if (m.has("logit_scale")) c.logit_scale = m.get<double>("logit_scale");
  if (m.has("logit_scale") && std::string(c.family).starts_with("granite")) c.logit_scale = 1 / c.logit_scale;
  validate(c);
  return c;
}

}  // namespace

Tensor GgufModel::find_tensor(const Table<float>& parts) const {
  const GgufName stored = gguf_name(config, parts.front().parameter);
  const auto found = file.tensors().find(stored.name);
  require(found != file.tensors().end(), file.path().string(), ": has no tensor ", quote(stored.name),
          ", which a model of ", config.family, " has; download it again, or convert it with a newer llama.cpp");
  Tensor tensor = found->second;
  const std::vector<Index> shape = stored_shape(parts);
  require(tensor.count == element_count(tensor.where, shape) &&
              (shape.empty() || tensor.shape.empty() || tensor.shape.back() == shape.back()),
          tensor.where, ": has the shape ", shown(tensor.shape), ", but the metadata need ", shown(shape));
  tensor.shape = shape;
  tensor.layout.rows = stored.rows, tensor.layout.columns = stored.columns, tensor.layout.change = stored.change;
  return tensor;
}

GgufModel::GgufModel(const fs::path& path) : file(path), config(config_of(file)) {
  std::set<std::string> used = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"};
  Tensors<float> none(config);
  for (const Table<float>& parts : by_stored_tensor(table(config, none))) {
    const Parameter& p = parts.front().parameter;
    std::vector<Tensor> found;
    for (const Table<float>& part : apart(parts)) {
      found.push_back(find_tensor(part));
      used.insert(gguf_name(config, part.front().parameter).name);
      const BlockLayout& layout = found.back().layout;
      const bool kept = *p.group != 0 || p.name == parameters_of(config).front().name || p.name == "lm_head.weight";
      if (!kept || size_of_block(layout.type).weights() == 1) continue;
      require(!layout.columns || layout.columns.inner % 16 == 0, found.back().where, ": value heads of ",
              layout.columns.inner, " are not multiples of 16");
      for (const Entry<float>& e : part) config.blocks[{p.name, e.parameter.part}] = layout.type;
    }
    Tensor tensor = found.size() == 1 ? found.front() : expert_by_expert(found, stored_shape(parts));
    tensors[p.name] = std::move(tensor);
  }
  for (const auto& [name, tensor] : file.tensors()) {
    const bool of_layer = name.starts_with("blk.");
    const bool later = of_layer && std::atoll(name.c_str() + 4) >= config.layers;  // predict more than the next token
    require(later || used.contains(name), tensor.where,
            " is not used by the model that the metadata describe, so results would differ without it");
  }
  texts = gguf_tokenizer(file.metadata(), path.string());
  Json json = config_to_json(config);
  json["pad_token_id"] = nullptr;
  texts["config.json"] = json.dump(2) + "\n";
}

const GgufModel& gguf_model(const fs::path& path) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, std::int64_t>, std::unique_ptr<GgufModel>> models;
  const std::lock_guard lock(mutex);
  const auto written = fs::last_write_time(path).time_since_epoch().count();
  auto& model = models[{fs::absolute(path).lexically_normal().string(), static_cast<std::int64_t>(written)}];
  if (!model) model = std::make_unique<GgufModel>(path);
  return *model;
}

}  // namespace streambp
