// What the commands share: options that describe a model, sizes as people write them, and tables as people read them.
#pragma once

#include <omp.h>
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "data/files/known_models.cuh"
#include "training/plan.cuh"

namespace streambp {

template <class... Values>
std::string format(const char* pattern, Values... values) {
  std::string text(static_cast<std::size_t>(std::snprintf(nullptr, 0, pattern, values...)), '\0');
  std::snprintf(text.data(), text.size() + 1, pattern, values...);
  return text;
}

inline std::string human_bytes(std::size_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  return unit == 0 ? format("%zu B", bytes) : format("%.2f %s", value, units[unit]);
}

inline std::string human_count(double value) {
  const char* units[] = {"", "k", "M", "G", "T", "P", "E"};
  int unit = 0;
  for (; std::abs(value) >= 1000 && unit < 6; ++unit) value /= 1000;
  return format(unit ? "%.2f%s" : "%.0f%s", value, units[unit]);
}

// "80GiB", "80G" and "80g" are 80 * 2^30 bytes, "80GB" is 80 * 10^9; a bare number is bytes.
inline std::size_t parse_bytes(const std::string& text) {
  std::size_t end = 0;
  double value = -1;
  try {
    value = std::stod(text, &end);
  } catch (const std::exception&) {
  }
  std::string unit = text.substr(end);
  for (char& c : unit) c = static_cast<char>(std::tolower(c));
  const std::size_t power = unit.empty() ? 0 : std::string("bkmgt").find(unit[0]);
  const bool decimal = unit.size() == 2 && unit[1] == 'b';
  const bool known = power != std::string::npos && (unit.size() <= 1 || decimal || unit.substr(1) == "ib");
  require(value > 0 && known, "\"", text, "\" is not an amount of memory; write it like 24GiB, 512MiB or 80GB");
  const double bytes = value * std::pow(decimal ? 1000.0 : 1024.0, static_cast<double>(power));
  require(bytes < 0x1p60, "\"", text, "\" is more memory than any machine has");
  return static_cast<std::size_t>(bytes);
}

// A table with a header; columns are as wide as their widest cell, and numbers (all but the first column) stand right.
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> header) : rows{std::move(header)} {}
  void add(std::vector<std::string> row) { rows.push_back(std::move(row)); }
  void print() const {
    std::vector<std::size_t> width(rows[0].size());
    for (const auto& row : rows) {
      for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
    }
    for (const auto& row : rows) {
      std::string line;
      for (std::size_t i = 0; i < row.size(); ++i) {
        const std::string space(width[i] - row[i].size(), ' ');
        line += i == 0 ? row[i] + space : "  " + space + row[i];
      }
      std::printf("%s\n", line.substr(0, line.find_last_not_of(' ') + 1).c_str());
    }
  }

 private:
  std::vector<std::vector<std::string>> rows;
};

// A model given by name, by the path of a config.json or its directory, or by family and sizes.
struct ModelOptions {
  std::string model, family = "llama";
  Index vocab = 256, hidden = 128, layers = 4, heads = 4, kv_heads = 0, head_dim = 0, mlp = 0, window = 0;
  std::string tied = "auto";
  std::vector<CLI::Option*> sizes;

  void add_to(CLI::App& app, const std::string& model_option, bool with_vocab) {
    const std::string group = "Model";
    const CLI::Validator size = CLI::Range(1, 1 << 24);
    if (!model_option.empty()) {
      std::string names;
      for (const auto& [known, config] : known_models()) names += (names.empty() ? "" : ", ") + known;
      app.add_option(model_option, model, "A config.json, a model directory, or one of: " + names)->group(group);
    }
    sizes = {app.add_option("--family", family, "gpt2, llama, mistral, qwen2, qwen3 or gemma3")
                 ->check(CLI::IsMember(family_names())),
             app.add_option("--hidden", hidden, "Width of the residual stream")->check(size),
             app.add_option("--layers", layers, "Number of layers")->check(size),
             app.add_option("--heads", heads, "Query heads")->check(size),
             app.add_option("--kv-heads", kv_heads,
                            "Key/value heads, a divisor of --heads (default: half of them; gpt2: all)")
                 ->check(size),
             app.add_option("--head-dim", head_dim, "Width of a head (default: hidden / heads)")->check(size),
             app.add_option("--mlp", mlp, "Width of the MLP (default: 8/3 of hidden; gpt2: 4 times)")->check(size),
             app.add_option("--window", window,
                            "Sliding attention window of mistral and of gemma3's local layers (default: 256)")
                 ->check(CLI::Range(0, 1 << 24)),
             app.add_option("--tied", tied,
                            "Share the head's weight with the embedding: yes, no, or auto (gpt2, qwen, gemma3: yes)")
                 ->check(CLI::IsMember({"auto", "yes", "no"}))};
    if (with_vocab) sizes.push_back(app.add_option("--vocab", vocab, "Vocabulary")->check(size));
    for (CLI::Option* option : sizes) option->group(group)->capture_default_str();
    for (const char* derived : {"--kv-heads", "--head-dim", "--mlp", "--window"})
      app.get_option(derived)->default_str("");
  }

  bool sizes_given() const {
    return std::any_of(sizes.begin(), sizes.end(), [](const CLI::Option* option) { return option->count() > 0; });
  }

  // max_length: what learned positions must reach.
  Config config(Index max_length) const {
    if (!model.empty()) {
      for (const CLI::Option* option : sizes) {
        require(option->count() == 0, option->get_name(), " belongs to a model given by --family and sizes, and \"",
                model, "\" is given by name; leave out one of them");
      }
      const auto known = known_models().find(model);
      if (known != known_models().end()) return known->second;
      require(std::filesystem::exists(model), "\"", model,
              "\" is neither the name of a known model (see --help) nor a config.json or model directory");
      return read_config(model);
    }
    require(family_names().contains(family), "there is no family \"", family, "\"");
    const bool gpt2 = family == "gpt2", gemma = family == "gemma3";
    const bool tied_by_default = gpt2 || gemma || family == "qwen2" || family == "qwen3";
    require(head_dim > 0 || hidden % heads == 0, "--hidden ", hidden, " is not divisible by --heads ", heads,
            "; choose sizes that divide, or give --head-dim");
    require(!gpt2 || kv_heads == 0 || kv_heads == heads,
            "gpt2 has as many key/value heads as query heads; leave out --kv-heads");
    require(!gpt2 || head_dim == 0 || head_dim * heads == hidden, "gpt2's heads share out --hidden ", hidden,
            " exactly; leave out --head-dim");
    require(window == 0 || family == "mistral" || gemma, "--window is for --family mistral and gemma3; ", family,
            " has no sliding window");
    const Index half_heads = heads % 2 == 0 ? heads / 2 : heads;
    Config c = make_config(family, vocab, hidden, layers, heads,
                           kv_heads ? kv_heads
                           : gpt2   ? heads
                                    : half_heads,
                           head_dim ? head_dim : hidden / heads,
                           mlp    ? mlp
                           : gpt2 ? 4 * hidden
                                  : round_up(hidden * 8 / 3, 32),
                           max_length, tied == "yes" || (tied == "auto" && tied_by_default));
    if (family == "mistral" || gemma) c.window = window ? window : 256;
    validate(c);
    return c;
  }
};

inline std::string describe(const Config& c) {
  return format(
      "%s, %s parameters: %ld layers of width %ld, %ld query and %ld key/value heads of %ld, MLP %ld, vocabulary "
      "%ld%s%s",
      c.family.c_str(), human_count(static_cast<double>(parameter_count(c))).c_str(), c.layers, c.hidden, c.heads,
      c.kv_heads, c.head_dim, c.mlp, c.vocab, c.tied ? " (tied)" : "",
      c.window ? format(", window %ld", c.window).c_str() : "");
}

inline void check_chunk(Index chunk, Index tile = kTile) {
  require(chunk > 0 && chunk % tile == 0, "--chunk ", chunk, " is not a multiple of ", tile,
          " rows, the tile in which all work is done; try ", std::max(tile, round_up(chunk, tile)));
}

}  // namespace streambp
