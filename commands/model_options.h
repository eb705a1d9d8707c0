// Options that describe a model: by name, by the path of a config.json or its directory, or by family and sizes.
#pragma once

#include "commands/option_table.h"
#include "commands/text.h"
#include "data/files/checkpoint.h"
#include "data/files/config.h"
#include "model/config.h"

namespace streambp {

// One line about a model.
inline std::string describe(const Config& c) {
  const Index convolutions = std::ranges::count(c.mixers, MixerKind::convolution);
  const std::string active =
      c.experts > 0 ? format(" (%s active)", human_count(static_cast<double>(active_parameters(c)))) : "";
  const std::string experts = c.experts > 0
                                  ? format("%ld of %ld experts of %ld%s", c.experts_per_token, c.experts, c.expert_mlp,
                                           c.shared_mlp > 0 ? format(" and one of %ld", c.shared_mlp) : "")
                                  : format("MLP %ld", c.mlp);
  return format(
      "%s, %s parameters%s: %ld layers of width %ld%s, %ld query and %ld key/value heads of %ld%s, %s, vocabulary "
      "%ld%s%s%s",
      c.family, human_count(static_cast<double>(parameter_count(c))), active, c.layers, c.hidden,
      convolutions > 0 ? format(" (%ld of them short convolutions)", convolutions) : "", c.heads, c.kv_heads,
      c.head_dim, c.wide.empty() ? "" : format(" (in global layers %ld of %ld)", c.global_kv_heads, c.global_head_dim),
      experts, c.vocab, c.tied ? " (tied)" : "", c.window ? format(", window %ld", c.window) : "",
      c.root.empty() ? "" : "; text model of a multimodal checkpoint; the other tensors stay unchanged");
}

inline void check_chunk(Index chunk, Index tile = kTile) {
  require(chunk > 0 && chunk % tile == 0, "--chunk ", chunk, " is not a multiple of ", tile, " rows, the tile of ",
          tile == kTile ? "all work" : "a GPU", "; try ", std::max(tile, round_up(chunk, tile)));
}

struct ModelOptions {
  std::string model, family = "llama";
  Index vocab = 256, hidden = 128, layers = 4, heads = 4, kv_heads = 0, head_dim = 0, mlp = 0, window = 0;
  Index experts = 0, experts_per_token = 0;
  std::string tied = "auto";

  enum class Vocabulary { fixed, an_option };
  // model_option: the option that names a model; empty: none.
  void add_to(OptionTable& options, const std::string& model_option, Vocabulary vocabulary) {
    options_ = &options;
    options.section("Model");
    if (!model_option.empty())
      options.add(model_option, &model,
                  "A config.json, a model directory, a run directory, or a name such as qwen3-8b that streambp "
                  "list models shows");
    const Check size = checks::between(1, kLargestSize);
    auto add = [&](const char* flag, Target value, const std::string& help, const Check& check,
                   const char* shown = "") {
      size_flags_.push_back(flag);
      options.add(flag, value, help, check, shown);
    };
    std::vector<std::string> families;
    for (const ModelFamily& f : model_families()) families.push_back(f.name);
    add("--family", &family, "A family that streambp list families shows", checks::one_of(families));
    add("--hidden", &hidden, "Width of the residual stream", size);
    add("--layers", &layers, "Number of layers", size);
    add("--heads", &heads, "Query heads", size);
    add("--kv-heads", &kv_heads, "Key/value heads, a divisor of --heads (default: half of --heads; gpt2: all)", size,
        "none");
    add("--head-dim", &head_dim, "Width of a head (default: hidden / heads)", size, "none");
    add("--mlp", &mlp, "Width of the MLP (default: 8/3 of hidden; gpt2: 4 times)", size, "none");
    add("--experts", &experts, "Experts of a layer (default: 8); without --family, the family is then qwen3_moe",
        checks::between(1, kMostExperts), "none");
    add("--experts-per-token", &experts_per_token, "Experts that a token uses, together as wide as --mlp (default: 2)",
        checks::between(1, kMostExperts), "none");
    add("--window", &window, "Window of local layers, in families that have them (default: 256)", size, "none");
    add("--tied", &tied, "Tie the head to the embedding: yes, no, or auto (as most models of the family)",
        checks::one_of({"auto", "yes", "no"}));
    if (vocabulary == Vocabulary::an_option) add("--vocab", &vocab, "Vocabulary size", size);
  }

  bool sizes_given() const { return options_->any_given(size_flags_); }

  // max_length: the number of learned positions.
  Config config(Index max_length) const {
    if (!model.empty()) return named();
    const bool with_experts = experts > 0 || experts_per_token > 0;
    const bool any_family = this->family == "llama" && !options_->given("--family");
    const std::string family = with_experts && any_family ? "qwen3_moe" : this->family;
    const ModelFamily& f = family_named(family);
    const auto is_stored = [](const Field& field) {
      const auto* size = std::get_if<Member<Index>>(&field.meaning);
      return size && *size == &Config::kv_heads && *field.name;
    };
    const bool all_heads = std::ranges::none_of(f.fields, is_stored);
    require(head_dim > 0 || hidden % heads == 0, "--hidden ", hidden, " is not divisible by --heads ", heads,
            "; choose sizes that divide, or give --head-dim");
    require(!all_heads || ((kv_heads == 0 || kv_heads == heads) && (head_dim == 0 || head_dim * heads == hidden)),
            family,
            " has as many key/value heads as query heads, and they divide --hidden evenly; leave out --kv-heads and ",
            "--head-dim");
    require(!with_experts || f.defaults.experts > 0, "--experts: ", family,
            " has no experts; choose another --family, such as qwen3_moe");
    require(window == 0 || f.defaults.window > 0, "--window: ", family, " has no sliding window; leave it out");
    const Index kv = kv_heads ? kv_heads : all_heads || heads % 2 != 0 ? heads : heads / 2;
    // with experts, the width of all that a token uses
    const Index used =
        f.defaults.experts == 0
            ? 1
            : (experts_per_token > 0 ? experts_per_token : f.defaults.experts_per_token) + (f.defaults.shared_mlp > 0);
    require(mlp % used == 0, "--mlp ", mlp, " cannot be divided among the ", used, " experts of a token; try ",
            round_up(mlp, used));
    const Index most_experts = experts > 0 ? experts : f.defaults.experts;
    require(experts_per_token <= most_experts, "--experts-per-token ", experts_per_token, ": there are ", most_experts,
            " experts; give more with --experts");
    const Index width = mlp ? mlp : f.defaults.gated() ? used * round_up(hidden * 8 / 3 / used, 32) : 4 * hidden;
    const bool is_tied = tied == "yes" || (tied == "auto" && f.defaults.tied);
    Config c = make_config(family, {vocab, hidden, layers, heads, kv, head_dim ? head_dim : hidden / heads, width,
                                    max_length, is_tied, experts, experts_per_token});
    if (f.defaults.window > 0) c.window = window ? window : 256;
    validate(c);
    return c;
  }

 private:
  Config named() const {
    options_->only(
        size_flags_, false,
        " sets a size of a new model, but " + quote(model) + " already has its sizes; leave out one of them");
    const auto known = known_models();
    if (known.contains(model)) return known.at(model);
    const std::string path = local_model(model);
    std::string name = model.substr(model.rfind('/') + 1);  // Qwen/Qwen3-8B is qwen3-8b
    for (char& c : name) c = static_cast<char>(std::tolower(c));
    std::error_code error;
    if (!fs::exists(path, error) && known.contains(name)) return known.at(name);
    require(
        fs::exists(path, error), quote(model),
        " is neither the name of a known model (streambp list models shows them) nor a config.json or model directory",
        how_to_download(model));
    return read_config(fs::is_directory(path) ? model_directory(path) : path);
  }

  OptionTable* options_ = nullptr;
  std::vector<std::string> size_flags_;
};

}  // namespace streambp
