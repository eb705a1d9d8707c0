// Options that describe a model: by name, by the path of a config.json or its directory, or by family and sizes.
#pragma once

#include "commands/option_table.h"
#include "commands/text.h"
#include "model/config.h"

namespace streambp {

struct ModelOptions {
  std::string model, family = "llama";
  Index vocab = 256, hidden = 128, layers = 4, heads = 4, kv_heads = 0, head_dim = 0, mlp = 0, window = 0;
  std::string tied = "auto";

  enum class Vocabulary { fixed, an_option };
  // model_option: the option that names a model; empty: none.
  void add_to(OptionTable& options, const std::string& model_option, Vocabulary vocabulary);

  bool sizes_given() const { return options_->any_given(size_flags_); }

  // max_length: the number of learned positions.
  Config config(Index max_length) const;

 private:
  Config named() const;

  OptionTable* options_ = nullptr;
  std::vector<std::string> size_flags_;
};

// One line about a model.
std::string describe(const Config& c);

void check_chunk(Index chunk, Index tile = kTile);

}  // namespace streambp
