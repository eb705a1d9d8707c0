// LoRA adapters in PEFT's layout: adapter_config.json, and adapter_model.safetensors with
// base_model.model.NAME.lora_A.weight and ...lora_B.weight, and the base's parameters that were trained as well
// (modules_to_save). When reading, the layers with adapters in the file must be those that the configuration names, in
// any of PEFT's ways.
#pragma once

#include "data/files/adapter_targets.h"
#include "data/files/model_directory.h"

namespace streambp {

// New adapters. `on`: names of linear layers, whole or without what comes before a dot; "all"; "attention".
struct LoraSettings {
  Index rank = 0;
  double alpha = 0;
  bool rank_stabilised = false;  // scale = alpha / √rank instead of alpha / rank
  std::vector<std::string> on = {"all"};
};

inline double adapter_scale(double alpha, Index rank, bool rank_stabilised) {
  const auto r = static_cast<double>(rank);
  return alpha / (rank_stabilised ? std::sqrt(r) : r);
}

// PEFT calls these parameters, not modules.
inline bool is_parameter(std::string_view group) { return group == "experts" || group == "router"; }

// The names of the linear layers that can have an adapter, in the table's order: of "attention", "mlp", "experts" or "router";
// "all" are the first two; empty: really all.
inline std::vector<std::string> linear_layers(const Config& c, std::string_view group = "all") {
  std::vector<std::string> names;
  for (const Parameter& p : parameters_of(c)) {
    if (*p.group && p.part == 0 && (group.empty() || group == p.group || (group == "all" && !is_parameter(p.group))))
      names.push_back(p.module());
  }
  return names;
}

inline std::string last_part(const std::string& name) { return name.substr(name.rfind('.') + 1); }

inline bool ends_with_name(const std::string& whole, const std::string& name) {
  return whole == name || whole.ends_with("." + name);
}

// What comes after the layer's number in the names of linear layers, of all kinds of layers.
inline std::vector<std::string> in_layers(const Config& c, const std::vector<std::string>& linear_layers) {
  const std::size_t prefix = module_name(c, family_of(c).modules.layers).size();
  std::vector<std::string> names;
  for (const std::string& whole : linear_layers) {
    const std::string name = whole.substr(whole.find('.', prefix) + 1);
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  }
  return names;
}

// The names that groups stand for: their last parts, if no other layer has them, or what comes after a layer's number.
inline std::vector<std::string> written_out(const Config& c, const std::vector<std::string>& on) {
  std::vector<std::string> names;
  auto add = [&](const std::string& name) {
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  };
  const std::vector<std::string> all = in_layers(c, linear_layers(c));
  for (const std::string& name : on) {
    if (is_parameter(name)) continue;
    const std::vector<std::string> group = in_layers(c, linear_layers(c, name));
    const bool clear = std::ranges::all_of(group, [&](const std::string& layer) {
      const auto has_same_end = [&](const std::string& other) { return last_part(other) == last_part(layer); };
      return std::ranges::count_if(group, has_same_end) == std::ranges::count_if(all, has_same_end);
    });
    for (const std::string& layer : group) add(clear ? last_part(layer) : layer);
    if (group.empty()) add(name);
  }
  return names;
}

// "target_parameters": what groups stand for that are no modules in transformers.
inline std::vector<std::string> target_parameters(const Config& c, const std::vector<std::string>& on) {
  std::vector<std::string> names;
  for (const char* group : {"experts", "router"}) {
    if (std::ranges::find(on, group) == on.end()) continue;
    for (const std::string& name : in_layers(c, linear_layers(c, group)))
      names.push_back(name + (group == std::string_view("router") ? ".weight" : ""));
  }
  return names;
}

inline std::map<std::string, AdapterSize> new_adapters(const Config& c, const LoraSettings& s) {
  const std::vector<std::string> layers = linear_layers(c);
  std::map<std::string, AdapterSize> adapters;
  require(std::isfinite(static_cast<float>(s.alpha)), "--lora-alpha ", s.alpha, " is too large");
  const AdapterSize size = {s.rank, adapter_scale(s.alpha, s.rank, s.rank_stabilised)};
  for (const std::string& group : s.on) {
    if (!is_parameter(group)) continue;
    require(c.experts > 0, "--lora-on ", group, ": the model has no experts");
    for (const std::string& layer : linear_layers(c, group)) adapters[layer] = size;
  }
  for (const std::string& name : written_out(c, s.on)) {
    bool found = false;
    for (const std::string& layer : layers) {
      if (!ends_with_name(layer, name)) continue;
      found = true;
      adapters[layer] = size;
    }
    std::set<std::string> known;
    for (const std::string& layer : layers) known.insert(last_part(layer));
    require(found, "--lora-on ", name, ": the model has no linear layer of this name in its layers; it has ",
            join(known), c.experts > 0 ? "; experts and router stand for the rest" : "");
  }
  return adapters;
}

// "target_modules": the names, or in a multimodal model a regular expression of them, so that PEFT leaves its other parts
// alone.
inline Json target_modules(const Config& c, const std::vector<std::string>& on) {
  if (c.root.empty()) return written_out(c, on);
  const auto escaped = [](const std::string& text) {
    std::string result;
    for (const char x : text) result += x == '.' ? std::string("\\.") : std::string(1, x);
    return result;
  };
  std::string names;
  for (const std::string& name : written_out(c, on)) names += (names.empty() ? "" : "|") + escaped(name);
  return escaped(c.root) + "(.*\\.)?(" + names + ")";
}

// What comes before a parameter's name in adapter_model.safetensors.
constexpr std::string_view kAdapterPrefix = "base_model.model.";
inline std::string adapter_prefix(const Config& c, const std::string& name) {
  return std::string(kAdapterPrefix) + (name == "lm_head.weight" ? "" : family_of(c).modules.root);
}

// The name of a parameter in adapter_model.safetensors. PEFT wraps the experts' module once for each of its parameters, the
// first innermost.
inline std::string name_in_adapter(const Config& c, const std::string& name) {
  const std::string prefix = adapter_prefix(c, name), in = family_of(c).modules.experts_in,
                    out = family_of(c).modules.experts_out;
  for (const std::string& module : {in, out}) {
    const std::size_t at = name.find("." + module + ".lora_");
    if (at == name.npos) continue;
    const std::string layer = name.substr(0, at + 1), end = name.substr(at + 1 + module.size());
    const bool inner = module == in && c.adapters.contains(layer + out);
    return prefix + layer + module.substr(0, module.rfind('.')) + (inner ? ".base_layer" : "") + end;
  }
  return prefix + name;
}

// --- Writing ---

// The text of a new adapter_config.json. `base`: the model directory that the adapters are for.
inline std::string adapter_config(const Config& c, const LoraSettings& s, const std::string& base) {
  std::set<std::string> modules;  // of the base, that are trained too
  for (const std::string& name : c.trained.value_or(std::set<std::string>()))
    modules.insert((adapter_prefix(c, name) + name.substr(0, name.rfind('.'))).substr(kAdapterPrefix.size()));
  const std::vector<std::string> parameters = target_parameters(c, s.on);
  const nlohmann::ordered_json config = {
      {"peft_type", "LORA"},
      {"task_type", "CAUSAL_LM"},
      {"base_model_name_or_path", base},
      {"r", s.rank},
      {"lora_alpha", s.alpha},
      {"lora_dropout", 0.0},
      {"use_rslora", s.rank_stabilised},
      {"target_modules", target_modules(c, s.on)},
      {"target_parameters", parameters.empty() ? Json() : Json(parameters)},
      {"modules_to_save", modules.empty() ? Json() : Json(modules)},
      {"bias", "none"},
      {"ensure_weight_tying", c.tied && !modules.empty()},
      {"fan_in_fan_out", family_of(c).modules.transposed},
      {"inference_mode", true},
  };
  return config.dump(2) + "\n";
}

// Saves the trained parameters, in float32, to an existing directory. Of the ranks that share them, rank 0 writes; the
// others have an empty directory.
template <class Device, class T>
void save_adapters(Device& dev, const fs::path& dir, const Config& c, const Table<T>& trained,
                   const std::string& config, const Group& ranks = {}) {
  SafetensorsWriter writer(dir.empty() ? dir : dir / "adapter_model.safetensors", {{"format", "pt"}});
  for (const Table<T>& parts : by_stored_tensor(trained)) {
    const std::string& name = parts.front().parameter.name;
    write_tensor(dev, writer, name_in_adapter(c, name), parts, "F32", ranks);
  }
  writer.finish();
  if (!dir.empty()) write_file_atomically(dir / "adapter_config.json", config);
}

// --- Reading ---

// Fields of adapter_config.json without effect on the model, and those that are read.
// clang-format off
constexpr std::string_view kKnownFields[] = {
    "peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules",
    "modules_to_save", "bias", "rank_pattern", "alpha_pattern", "target_parameters", "exclude_modules", "layers_pattern", "layers_to_transform",
    "auto_mapping", "fan_in_fan_out", "init_lora_weights", "loftq_config", "inference_mode", "eva_config", "corda_config",
    "ensure_weight_tying", "megatron_core", "qalora_group_size", "peft_version", "revision", "runtime_config"};
// clang-format on

class AdapterDirectory {
  const std::string config_path_;

 public:
  const std::string config;  // the text of adapter_config.json

  explicit AdapterDirectory(const fs::path& dir)
      : config_path_((dir / "adapter_config.json").string()),
        config(read_model_file(config_path_)),
        json_(parse_json(config, config_path_)),
        file_(dir / "adapter_model.safetensors") {
    check_kind();
  }

  // The model directory that adapter_config.json names; it may not exist on this machine.
  std::string base() const { return fields().get<std::string>("base_model_name_or_path", ""); }

  // Adds the adapters to the configuration of their base.
  void add_to(Config& c) const {
    const std::vector<std::string> linear = linear_layers(c, "");
    const std::set<std::string> layers(linear.begin(), linear.end());
    std::set<std::string> parameters, of_experts;
    for (const std::string& layer : linear_layers(c, "experts"))
      if (targets_parameter(c, layer)) c.adapters[layer] = {};
    for (const auto& [layer, size] : c.adapters)
      for (const char* end : {".lora_A.weight", ".lora_B.weight"}) of_experts.insert(name_in_adapter(c, layer + end));
    for (const Parameter& p : parameters_of(c)) parameters.insert(p.name);
    c.trained.emplace();
    for (const auto& [stored, tensor] : file_.tensors()) {
      if (of_experts.contains(stored)) continue;
      const std::string name = without_prefix(c, stored, tensor), layer = name.substr(0, name.rfind(".lora_"));
      if (name.ends_with(".lora_A.weight") || name.ends_with(".lora_B.weight")) {
        require(!wraps_experts(layer), tensor.where, ": is of experts, but \"target_parameters\" in ", config_path_,
                " does not name parameters of the model's experts", c.experts > 0 ? "" : ", which has none");
        require(layers.contains(layer), tensor.where, ": an adapter of ", quote(layer),
                " is not supported; only of linear layers inside the layers of the model");
        c.adapters[layer] = {};
      } else {
        refuse_other_methods(name, tensor);
        require(parameters.contains(name), tensor.where, ": ", quote(name), " is not a parameter of the model; is it ",
                "the adapter's base?");
        c.trained->insert(name);
      }
    }
    require(!c.adapters.empty(), file_.path().string(), ": has no adapters");
    check_targets(c);
    check_saved_modules(c);
    read_sizes(c);
  }

  // Loads the adapters, and the parameters of the base that were trained too.
  template <class Device, class T>
  void load(Device& dev, Model<T>& model) const {
    load(dev, model.config, table(model.config, model.weights), model.shards);
  }
  // Loads the stored ones of these parameters. Each rank holds its shard of a parameter, or all of it.
  template <class Device, class T>
  void load(Device& dev, const Config& c, const Table<T>& rows, const Group& ranks) const {
    struct Files {
      const SafetensorsFile& file;
      const Config& c;
      const Tensor& at(const std::string& name) const { return file.at(name_in_adapter(c, name)); }
    };
    const auto is_stored = [&](const Parameter& p) { return file_.find(name_in_adapter(c, p.name)) != nullptr; };
    read_tensors(dev, Files{file_, c}, "", rows_where(rows, is_stored), ranks);
  }

  // The text of adapter_config.json for these adapters of another copy of the base.
  std::string config_for(const std::string& base) const {
    if (base == this->base()) return config;
    return with_member(config, "base_model_name_or_path", base);
  }
  bool drops_out() const { return fields().get<double>("lora_dropout", 0.0) > 0; }

 private:
  Fields fields() const { return {json_, config_path_}; }

  void check_kind() const {
    const Fields f = fields();
    const auto type = f.get<std::string>("peft_type");
    require(type == "LORA", config_path_, ": \"peft_type\": ", quote(type), " is not supported; only LORA is");
    for (const char* method : {"use_dora", "lora_bias", "use_qalora", "use_bdlora"}) f.only(method, false);
    f.only("bias", "none");
    for (const auto& [name, value] : json_.items()) {
      const bool is_off = value.is_null() || value == false || (value.is_structured() && value.empty());
      require(is_off || std::ranges::find(kKnownFields, name) != std::end(kKnownFields), config_path_, ": the field ",
              quote(name), ": ", shown(value), " is not supported");
    }
    // These replace the weights of the base, so the adapter alone does not describe the model.
    if (f.has("init_lora_weights") && json_.at("init_lora_weights").is_string()) {
      const auto method = f.get<std::string>("init_lora_weights");
      require(method == "gaussian" || method == "orthogonal" || method == "eva", config_path_,
              ": \"init_lora_weights\": ", quote(method), " is not supported; convert it to plain LoRA with PEFT");
    }
  }

  std::string without_prefix(const Config& c, const std::string& stored, const Tensor& tensor) const {
    for (const std::string& prefix : {adapter_prefix(c, ""), std::string(kAdapterPrefix)}) {
      if (stored.starts_with(prefix)) return stored.substr(prefix.size());
    }
    fail(tensor.where, ": its name does not begin with ", adapter_prefix(c, ""), "; is it the adapter of a ", c.family,
         " model?");
  }

  void refuse_other_methods(const std::string& name, const Tensor& tensor) const {
    require(name.find("lora_magnitude_vector") == std::string::npos, tensor.where, ": DoRA is not supported");
    require(name.find("lora_embedding_") == std::string::npos, tensor.where,
            ": adapters of the embedding are not supported");
  }

  // The name of a layer or module in PEFT's model.
  static std::string name_in_peft(const Config& c, const std::string& name) {
    return adapter_prefix(c, "").substr(kAdapterPrefix.size()) + name;
  }

  // Whether this is what PEFT calls its wrappers of experts.
  static bool wraps_experts(const std::string& layer) {
    return layer.ends_with(".experts") || layer.ends_with(".experts.base_layer");
  }
  // Whether "target_parameters" has this one.
  bool targets_parameter(const Config& c, const std::string& name) const {
    const ModuleNames targets(fields(), "target_parameters", json_.value("target_parameters", Json()));
    return targets.has(name_in_peft(c, name)) || targets.has_end(name_in_peft(c, name));
  }

  // The file has adapters of the layers that the configuration names, and of no others.
  void check_targets(const Config& c) const {
    const Modules& names = family_of(c).modules;
    std::vector<std::string> usual = {last_part(names.q), last_part(names.v)};  // where PEFT puts them by itself
    if (fields().has("target_parameters")) usual.clear();
    const AdapterTargets targets(fields(), usual);
    const std::vector<std::string> modules = linear_layers(c), routers = linear_layers(c, "router");
    const auto is_in = [](const auto& list, const std::string& name) {
      return std::ranges::find(list, name) != list.end();
    };
    const std::vector<std::string> experts = linear_layers(c, "experts");
    for (const std::string& name :
         strings_of(fields(), "target_parameters", json_.value("target_parameters", Json()))) {
      const auto is_named = [&](const std::string& parameter) {
        return ends_with_name(name_in_peft(c, parameter), name);
      };
      require(std::ranges::any_of(experts, is_named) ||
                  std::ranges::any_of(routers, [&](const std::string& layer) { return is_named(layer + ".weight"); }),
              config_path_, ": \"target_parameters\": ", quote(name),
              " is not supported; only parameters of the model's experts and routers are");
    }
    for (const std::string& layer : linear_layers(c, "")) {
      const bool wanted = is_in(modules, layer)
                              ? targets.contain(name_in_peft(c, layer))
                              : targets_parameter(c, layer + (is_in(routers, layer) ? ".weight" : ""));
      const bool stored = c.adapters.contains(layer);
      require(stored || !wanted, file_.path().string(), ": has no adapter of ", layer, ", which ", config_path_,
              " names; the file is incomplete");
      require(wanted || !stored, file_.path().string(), ": has an adapter of ", layer, ", which ", config_path_,
              " does not name; PEFT would ignore it. Correct \"target_modules\" or \"target_parameters\"");
    }
    Tensors<float> none(c);
    const std::string embedding = embedding_table(c, none).front().parameter.name;
    for (const std::string& other :
         {std::string("lm_head"), name_in_peft(c, embedding.substr(0, embedding.rfind('.')))})
      require(!targets.contain_other(other), file_.path().string(), ": has no adapter of ", other, ", which ",
              config_path_, " names, and which is not supported; only linear layers inside the layers are");
  }

  // Every module that the configuration lists is in the file.
  void check_saved_modules(const Config& c) const {
    const Fields f = fields();
    for (const std::string& name : strings_of(f, "modules_to_save", json_.value("modules_to_save", Json()))) {
      const bool found = std::ranges::any_of(*c.trained, [&](const std::string& stored) {
        const std::string module = stored.substr(0, stored.rfind('.'));
        return ends_with_name(name_in_peft(c, module), name) || module == name;
      });
      require(found, file_.path().string(), ": has no tensor of ", quote(name),
              ", which \"modules_to_save\" lists; the file is incomplete");
    }
    require(!c.tied || !c.trained->contains(parameters_of(c).front().name) || f.get<bool>("ensure_weight_tying", false),
            config_path_, ": the embedding is trained and also the head, but \"ensure_weight_tying\" is not true");
  }

  void read_sizes(Config& c) const {
    const Fields f = fields();
    const PatternValues ranks(f, "rank_pattern", config), alphas(f, "alpha_pattern", config);
    const auto all_rank = static_cast<double>(f.get<Index>("r"));
    const double all_alpha = f.get<double>("lora_alpha", 8.0);
    const bool rank_stabilised = f.get<bool>("use_rslora", false);
    const std::vector<std::string> experts = linear_layers(c, "experts");
    for (auto& [layer, size] : c.adapters) {
      file_.at(name_in_adapter(c, layer + ".lora_B.weight"));
      const Tensor& a = file_.at(name_in_adapter(c, layer + ".lora_A.weight"));
      const double rank = ranks.at(name_in_peft(c, layer), all_rank);
      const Index count = std::ranges::find(experts, layer) != experts.end() ? c.experts : 1;
      if (a.shape.size() != 2 || a.shape[0] <= 0 ||
          static_cast<double>(a.shape[0]) != rank * static_cast<double>(count))
        fail(a.where, " has shape ", shown(a.shape), ", but ", config_path_, " says that its rank is ", rank,
             count > 1 ? ", of each of " + std::to_string(count) + " experts" : "");
      size = {a.shape[0] / count,
              adapter_scale(alphas.at(name_in_peft(c, layer), all_alpha), a.shape[0] / count, rank_stabilised)};
      require(std::isfinite(static_cast<float>(size.scale)), config_path_, ": \"lora_alpha\" is too large");
    }
  }

  const Json json_;
  const SafetensorsFile file_;
};

inline bool has_adapters(const fs::path& dir) {
  std::error_code error;
  return fs::exists(dir / "adapter_config.json", error);
}

}  // namespace streambp
