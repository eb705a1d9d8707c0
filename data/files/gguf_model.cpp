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
    {"lfm2moe", "lfm2_moe"}, {"qwen35moe", "qwen3_5_moe", false, true, "post_attention_norm"},
    {"qwen3next", "qwen3_next", false, true, "post_attention_norm"},
    {"gpt-oss", "gpt_oss", false, false, "post_attention_norm"}, {"gpt2", "gpt2"}};

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
    {"mlp.router", "ffn_gate_inp"}, {"ln_1", "attn_norm"}, {"ln_2", "ffn_norm"},
    {"attn.c_attn", "attn_qkv"}, {"attn.c_proj", "attn_output"},
    {"conv.in_proj", "shortconv.in_proj"}, {"conv.conv", "shortconv.conv"}, {"conv.out_proj", "shortconv.out_proj"},
    {"linear_attn.in_proj_qkv", "attn_qkv"}, {"linear_attn.in_proj_z", "attn_gate"},
    {"linear_attn.in_proj_b", "ssm_beta"}, {"linear_attn.in_proj_a", "ssm_alpha"}, {"linear_attn.conv1d", "ssm_conv1d"},
    {"linear_attn.in_proj_ba", "ssm_ba"}, {"linear_attn.A_log", "ssm_a"}, {"linear_attn.dt_bias", "ssm_dt.bias"}, {"linear_attn.norm", "ssm_norm"},
    {"linear_attn.out_proj", "ssm_out"}};
// clang-format on

// The rest of a name after a module, or nothing if it is another one.
std::optional<std::string> after(const std::string& name, const std::string& module) {
  if (name == module) return "";
  if (name.starts_with(module + ".")) return name.substr(module.size());
  return {};
}

}  // namespace

std::span<const GgufFamily> gguf_families() { return kFamilies; }

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
          {names.positions, "position_embd"},
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
    for (const auto& [end, kind] : {std::pair("", ".weight"), {"_bias", ".bias"}}) {
      if (tail == std::string(names.experts_in) + end)
        found.name = layer + (p.part == 0 ? "ffn_gate_exps" : "ffn_up_exps") + kind;
      if (tail == std::string(names.experts_out) + end) found.name = layer + "ffn_down_exps" + kind;
    }
    const bool joint = names.z == names.delta_q;  // of Qwen3-Next; its value heads keep their order
    if (joint && tail == std::string(names.z) + ".weight")
      found.name = layer + (p.part < 3 ? "attn_qkv.weight" : "attn_gate.weight");
    const auto is = [&](const char* module) { return after(tail, module).has_value(); };
    if (g.permuted && (is("self_attn.q_proj") || is("self_attn.k_proj"))) found.rows = {2, c.head_dim / 2};
    const Index keys = joint ? 1 : c.delta_key_heads, group = c.delta_value_heads / most(keys, 1),
                dim = c.delta_value_dim;
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

GgufModel::GgufModel(const fs::path& path) : file(path), config(gguf_config(file)) {
  Tensors<float> none(config);
  const Table<float> all = table(config, none);
  for (const Entry<float>& e : all) {
    const Parameter& p = e.parameter;
    const GgufName stored = gguf_name(config, p);
    const auto found = file.tensors().find(stored.name);
    const std::string layer = stored.name.substr(0, stored.name.find('.', 4) + 1);
    const auto has = [&](const char* fused) { return file.tensors().contains(layer + fused); };
    require(found != file.tensors().end(), path.string(), ": has no tensor ", quote(stored.name), ", which a model of ",
            config.family, " has; ",
            has("attn_qkv.weight") || has("ffn_gate_up_exps.weight")
                ? "convert the model without --fuse-qkv and --fuse-gate-up-exps"
                : "download it again, or convert it with a newer llama.cpp");
    Tensor& tensor = tensors.try_emplace(stored.name, found->second).first->second;
    BlockLayout& layout = tensor.layout;
    layout.rows = stored.rows, layout.columns = stored.columns, layout.change = stored.change;
    const bool kept = *p.group != 0 || p.name == all.front().parameter.name || p.name == "lm_head.weight";
    if (!kept || size_of_block(layout.type).weights() == 1) continue;
    require(!layout.columns || layout.columns.inner % 16 == 0, tensor.where, ": value heads of ", layout.columns.inner,
            " are not multiples of 16");
    config.blocks[{p.name, p.part}] = layout.type;
  }
  for (const Table<float>& parts : by_stored_tensor(as_in_gguf(config, all))) {
    Tensor& tensor = tensors.at(parts.front().parameter.name);
    const std::vector<Index> shape = stored_shape(parts);
    require(tensor.count == element_count(tensor.where, shape) &&
                (shape.empty() || tensor.shape.empty() || tensor.shape.back() == shape.back()),
            tensor.where, ": has the shape ", shown(tensor.shape), ", but the metadata need ", shown(shape));
    tensor.shape = shape;
  }
  const std::set<std::string> read = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"};
  const Index blocks = file.metadata().at(std::string(gguf_family(config.family)->architecture) + ".block_count");
  for (const auto& [name, tensor] : file.tensors()) {
    const Index layer = name.starts_with("blk.") ? std::atoll(name.c_str() + 4) : -1;
    const bool later = layer >= config.layers && layer < blocks;  // predicts more than the next token
    require(later || tensors.contains(name) || read.contains(name), tensor.where,
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
