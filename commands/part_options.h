// The options that say which part of a model is trained: adapters, some parameters, or all of them.
#pragma once

#include "commands/option_table.h"
#include "commands/text.h"
#include "data/files/adapters.h"
#include "data/files/checkpoint.h"
#include "data/files/hash.h"
#include "training/blocks.h"

namespace streambp {

// Declares --base, and says what it stands for.
inline void add_base_option(OptionTable& options, std::string& base) {
  options.add(
      "--base", &base,
      "nf4: keep the linear layers' weights in 4 bits (QLoRA); plain: as the model's files hold them; unpacked: "
      "the same, but MXFP4 and a GGUF file's blocks become numbers of the run's type, which may be far or in shards",
      checks::one_of({"plain", "nf4", "unpacked"}));
}

inline void choose_base(const std::string& base, Config& c) {
  if (base == "nf4") c.base = Base::nf4;
  if (base == "unpacked") c.mxfp4 = false;
  if (base != "plain") c.blocks.clear();
}
inline void apply_base(const std::string& base, Config& c) {
  choose_base(base, c);
  if (c.base == Base::plain && c.blocks.empty()) return;
  require(!c.adapters.empty(), "a quantised base is never saved, so only its adapters can be trained; add --lora RANK",
          c.blocks.empty() ? "" : ", or load its numbers with --base unpacked");
  for (const Parameter& p : trained_parameters(c))
    require(*p.group == 0 && !c.blocks.contains({p.name, p.part}), p.name,
            " is trained, but quantised weights are frozen; ",
            c.blocks.empty() ? "leave out --base or --train" : "add --base unpacked, or leave out --train");
}

// "17.4M of 8.2B parameters are trained"; empty if all are.
inline std::string describe_trained(const Config& c) {
  const Index trained = trained_count(c), all = parameter_count(c);
  if (!c.trained) return "";
  return format("%s of %s parameters are trained%s", human_count(static_cast<double>(trained)),
                human_count(static_cast<double>(all)),
                c.adapters.empty()
                    ? ""
                    : format(", adapters of %s", counted(static_cast<Index>(c.adapters.size()), "linear layer"))) +
         (c.keeps_mxfp4() ? "; experts stay in MXFP4" : "");
}

struct PartOptions {
  LoraSettings lora;  // its alpha is 0 by default: twice the rank
  std::string train;  // a regular expression on names; empty: all parameters, or with adapters none
  BlockSettings blocks;
  std::string block_order = "random", base = "plain";

  enum class Of { step, run };  // only a run takes turns
  void add_to(OptionTable& options, Of of = Of::step) {
    options_ = &options;
    options.section("What is trained");
    options.add("--lora", &lora.rank, "Train low-rank adapters of this rank beside the frozen model (LoRA); 0: none",
                checks::between(0, 1 << 14));
    options.add("--lora-alpha", &lora.alpha, "Adapters are multiplied by this / rank", checks::positive(),
                "twice the rank");
    options.add(
        "--lora-on", &lora.on,
        "Linear layers with adapters: all, attention, mlp, or names such as q_proj v_proj; of a mixture of experts "
        "also experts and router, which all leaves out");
    options.add("--rslora", &lora.rank_stabilised, "Divide alpha by the square root of the rank (rsLoRA)");
    options.add("--train", &train,
                "Train only the parameters with names that this regular expression matches, such as "
                "'model.layers.(2[0-9]|3[0-5]).*'; with --lora: parameters of the base to train as well",
                {}, "all; with --lora none");
    options.add("--blocks", &blocks.layers,
                "Train one block of this many layers at a time (BAdam), all others frozen; 0: all at once",
                checks::between(0, kMostLayers));
    if (of == Of::run) {
      options.add("--block-steps", &blocks.steps, "Steps until the next block", checks::between(1, 1 << 30));
      options.add("--block-order", &block_order, "random, ascending or descending",
                  checks::one_of({"random", "ascending", "descending"}));
    }
    add_base_option(options, base);
  }
  static inline const std::vector<std::string> kFlags = {"--lora",  "--lora-alpha", "--lora-on",     "--rslora",
                                                         "--train", "--blocks",     "--block-steps", "--block-order"};

  void check() const {
    options_->only({"--lora-alpha", "--lora-on", "--rslora"}, adapters(), " needs --lora RANK");
    options_->only({"--block-steps", "--block-order"}, blocks.layers > 0, " needs --blocks LAYERS");
    require(!blocks || (!adapters() && train.empty()), "--blocks says what is trained; leave out --lora and --train");
  }
  bool adapters() const { return lora.rank > 0; }
  LoraSettings settings() const {
    LoraSettings s = lora;
    if (s.alpha == 0) s.alpha = 2 * static_cast<double>(s.rank);
    return s;
  }
  BlockSettings block_settings(std::uint64_t seed) const {
    BlockSettings s = blocks;
    s.seed = seed;
    s.order = block_order == "random"      ? BlockOrder::random
              : block_order == "ascending" ? BlockOrder::ascending
                                           : BlockOrder::descending;
    return s;
  }
  // Sets what is trained of a model.
  void apply(Config& c) const {
    check();
    choose(c);
    apply_base(base, c);
  }

 private:
  void choose(Config& c) const {
    if (blocks) {  // the lowest block needs the most memory
      require(c.layers % blocks.layers == 0, "--blocks ", blocks.layers, ": the model's ", c.layers,
              " layers are not a multiple of this");
      Index alike = blocks.layers;
      while (!blocks_are_alike(c, alike)) ++alike;
      require(alike == blocks.layers, "--blocks ", blocks.layers, ": the model's layers are of several kinds, and ",
              "blocks must be alike; choose --blocks ", alike);
      c.trained = names_of_block(c, blocks, 0);
      return;
    }
    if (!train.empty()) {
      const NamePattern pattern("--train", train);
      std::string names;
      const std::vector<Parameter> all = trained_parameters(c);  // without a router's bias, which is never trained
      c.trained.emplace();
      for (const Parameter& p : all) {
        if (pattern.matches(p.name)) c.trained->insert(p.name);
        if (names.size() < 200) names += " " + p.name;
      }
      require(!c.trained->empty(), "--train ", quote(train), ": no parameter has such a name; the first ones are",
              names);
    }
    if (!adapters()) return;
    if (!c.trained) c.trained.emplace();
    for (const std::string& name : *c.trained)
      require(name.ends_with(".weight") || name.ends_with(".bias"), "--train matches ", name,
              ", which is no module's weight or bias, so files of adapters cannot hold it; leave it or --lora out");
    c.adapters = new_adapters(c, settings());
    for (const auto& [layer, size] : c.adapters) {
      for (const char* part : {".weight", ".bias"})
        require(!c.trained->contains(layer + part), "--train matches ", layer, part,
                ", but the layer has an adapter; choose one of them (--lora-on names the layers with adapters)");
    }
  }

  OptionTable* options_ = nullptr;
};

// A model, perhaps with adapters, as the options --model and --adapter name it.
struct ModelSource {
  std::string model, adapter;  // directories; no adapter: empty
  std::string base = "plain";

  // Resolves run directories. Without a model, the adapter's files name it.
  void resolve() {
    require(!model.empty() || !adapter.empty(), "--model is required");
    if (!adapter.empty()) adapter = adapter_directory(adapter);
    if (model.empty()) {
      model = AdapterDirectory(adapter).base();
      std::error_code error;
      const Json state = is_complete_checkpoint(adapter) ? read_sealed_json(state_of(adapter)) : Json::object();
      model = state.value("base_directory", model);
      require(fs::is_directory(model, error) || is_gguf(model), adapter, ": its base ", quote(model),
              " is not on this machine; name the base with --model");
      require(!state.contains("base") || state["base"] == contents_key(model_directory(model)), model,
              ": has changed since the adapters of ", adapter,
              " were trained; restore it, or name a base with --model");
    }
    model = model_directory(model);
  }
  Config config() const {
    Config c = read_config(model);
    if (!adapter.empty()) AdapterDirectory(adapter).add_to(c);
    if (adapter.empty()) {
      c.trained.emplace();  // nothing
      choose_base(base, c);
    } else {
      apply_base(base, c);
    }
    return c;
  }
  std::string name() const { return adapter.empty() ? model : adapter; }
  void add_to(OptionTable& options) {
    options.add("--model", &model,
                "A model directory, a GGUF file or a run directory; not needed if --adapter names its base");
    options.add("--adapter", &adapter, "A directory of LoRA adapters in PEFT's layout, or a run that trained them");
    add_base_option(options, base);
  }
};

}  // namespace streambp
