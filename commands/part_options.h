// The options that say which part of a model is trained: adapters, some parameters, or all of them.
#pragma once

#include "commands/option_table.h"
#include "data/files/adapters.h"
#include "training/blocks.h"

namespace streambp {

struct PartOptions {
  LoraSettings lora;  // its alpha is 0 by default: twice the rank
  std::string train;  // a regular expression on names; empty: all parameters, or with adapters none
  BlockSettings blocks;
  std::string block_order = "random", base = "plain";

  enum class Of { step, run };  // only a run takes turns
  void add_to(OptionTable& options, Of of = Of::step);
  static inline const std::vector<std::string> kFlags = {"--lora",  "--lora-alpha", "--lora-on",     "--rslora",
                                                         "--train", "--blocks",     "--block-steps", "--block-order"};

  void check() const;
  bool adapters() const { return lora.rank > 0; }
  LoraSettings settings() const;
  BlockSettings block_settings(std::uint64_t seed) const;
  // Sets what is trained of a model.
  void apply(Config& c) const;

 private:
  void choose(Config& c) const;

  OptionTable* options_ = nullptr;
};

// Declares --base, and says what it stands for.
void add_base_option(OptionTable& options, std::string& base);
void apply_base(const std::string& base, Config& c);

// "17.4M of 8.2B parameters are trained"; empty if all are.
std::string describe_trained(const Config& c);

// A model, perhaps with adapters, as the options --model and --adapter name it.
struct ModelSource {
  std::string model, adapter;  // directories; no adapter: empty
  std::string base = "plain";

  // Resolves run directories. Without a model, the adapter's files name it.
  void resolve();
  Config config() const;
  std::string name() const { return adapter.empty() ? model : adapter; }
  void add_to(OptionTable& options);
};

}  // namespace streambp
