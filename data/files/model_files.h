// The tensors of a model: in model.safetensors, in shards with model.safetensors.index.json, which lists the shard of each
// tensor, or in a GGUF file. Published models differ in the names of tensors, and in how they store experts.
#pragma once

#include "data/files/files.h"
#include "data/files/gguf_model.h"
#include "data/files/quantised.h"

namespace streambp {

// Names of the heads that predict more than the next token. They are neither computed nor changed.
constexpr std::string_view kMtp = "mtp.";

// How the files call the parameters.
struct StoredNames {
  std::string prefix = {};  // comes before all names but the head's
  // In a multimodal model: names begin with `text` instead of `root`.
  std::string root = {}, text = {}, head = "lm_head.weight";
  TensorPieces pieces = {};  // also of tensors with another name: by the usual one

  std::string of(const std::string& name) const {
    if (name == "lm_head.weight") return head;
    return !root.empty() && name.starts_with(root) ? text + name.substr(root.size()) : prefix + name;
  }
};

// The name of a tensor of an expert (StoredAs in model/family.h).
inline std::string of_expert(std::string name, Index expert) {
  const std::size_t at = name.find('%');
  return at == name.npos ? name : name.replace(at, 1, std::to_string(expert));
}

// A new model's experts are stored as those of published models are.
inline TensorPieces pieces_of_experts(const Config& c) {
  TensorPieces pieces;
  Tensors<float> none(c);
  for (const Table<float>& parts : by_stored_tensor(table(c, none))) {
    const std::string& name = parts.front().parameter.name;
    const std::vector<Index> shape = stored_shape(parts);
    for (const StoredAs& other : family_of(c).modules.others) {
      if (c.experts == 0 || !name.ends_with(other.tensor)) continue;
      const std::string layer = name.substr(0, name.size() - std::strlen(other.tensor));
      const bool apart = std::strchr(other.stored.front(), '%');
      for (Index e = 0; e < (apart ? c.experts : 1); ++e)
        for (const char* stored : other.stored)
          pieces[name].emplace_back(layer + of_expert(stored, e),
                                    apart ? std::vector{shape[1] / std::ssize(other.stored), shape[2]} : shape);
    }
  }
  return pieces;
}

// Gives tensors that have another name, or are in pieces, their usual name. `joined` keeps them.
inline void find_pieces(const StoredAs& other, std::map<std::string, const Tensor*>& tensors,
                        std::map<std::string, Tensor>& joined, TensorPieces& pieces) {
  const std::string first = other.stored.front();
  const std::size_t number = first.find('%');
  for (const auto& [name, tensor] : std::map(tensors)) {
    const auto is_in = [&name = name](const std::string& end) { return name.ends_with("." + of_expert(end, 0)); };
    const auto piece = std::ranges::find_if(other.stored, is_in);
    if (piece == other.stored.end() || !tensors.contains(name)) continue;  // or joined already
    const std::string layer = name.substr(0, name.size() - of_expert(*piece, 0).size()), usual = layer + other.tensor;
    require(!tensors.contains(usual), tensor->where, ": is there twice, also as ", quote(usual),
            "; remove one of them");
    std::vector<const Tensor*> parts;
    const Index experts = number == first.npos ? 0 : std::ranges::count_if(tensors, [&](const auto& entry) {
      return entry.first.starts_with(layer + first.substr(0, number)) &&
             entry.first.ends_with(first.substr(number + 1));
    });
    for (Index e = 0; e < most(experts, 1); ++e) {
      for (const char* stored : other.stored) {
        const std::string piece = layer + of_expert(stored, e);
        require(tensors.contains(piece), tensor->where, ": is a piece of a tensor, but there is no ", quote(piece),
                "; download what is missing");
        parts.push_back(tensors.extract(piece).mapped());
        pieces[usual].emplace_back(piece, parts.back()->shape);
      }
    }
    tensors[usual] = &(joined[usual] = join(parts, experts));
  }
}

// The tensors of a model directory, in one file or in shards. `root`: Config::root.
class ModelFiles {
 public:
  explicit ModelFiles(const fs::path& dir, const std::string& root = "") : dir(dir) {
    if (is_gguf(dir)) {
      for (const auto& [name, tensor] : gguf_model(dir).tensors) tensors[name] = &tensor;
      gguf_ = &gguf_model(dir).config, names_.pieces = pieces_of_experts(*gguf_);
      return;
    }
    const fs::path index = dir / "model.safetensors.index.json", single = dir / "model.safetensors";
    if (!fs::exists(single) && fs::exists(index)) {
      open_shards(index);
    } else {
      require(fs::exists(single) || !fs::is_directory(dir), dir.string(),
              ": has neither model.safetensors nor model.safetensors.index.json; download what is missing, or convert "
              "other formats to safetensors");
      files.emplace_back(single);
      for (const auto& [name, tensor] : files.back().tensors()) tensors[name] = &tensor;
    }
    for (const auto& family : model_families()) {
      const std::string prefix = family.modules.root;
      if (tensors.contains(prefix + family.modules.tokens + ".weight")) names_.prefix = prefix;
    }
    if (!root.empty()) names_.root = root, find_text_model();
    find_mxfp4(tensors, joined_);
    for (const auto& family : model_families())
      for (const StoredAs& other : family.modules.others) find_pieces(other, tensors, joined_, names_.pieces);
  }

  // Null if there is no such tensor.
  const Tensor* find(const std::string& name) const {
    const auto found = tensors.find(names_.of(name));
    return found == tensors.end() ? nullptr : found->second;
  }
  const Tensor& at(const std::string& name) const {
    const Tensor* found = find(name);
    require(found, dir.string(), ": no tensor ", quote(names_.of(name)), " among the ", tensors.size(),
            " of its files; do they belong to this config.json?");
    return *found;
  }
  const Tensor& embedding(const Config& c) const {
    Tensors<float> none(c);
    return at(stored(table(c, none)).front().parameter.name);
  }
  // The parameters as the files have them.
  template <class T>
  Table<T> stored(const Table<T>& table) const {
    return gguf_ ? as_in_gguf(*gguf_, table) : table;
  }
  const StoredNames& names() const { return names_; }
  const std::map<std::string, const Tensor*>& all() const { return tensors; }

  // The tensors of a model's other parts: of a multimodal one all but the text model's.
  std::map<std::string, const Tensor*> other_parts() const {
    std::map<std::string, const Tensor*> others = tensors;
    std::erase_if(others, [&](const auto& entry) {
      if (entry.first.starts_with(kMtp)) return false;
      return names_.root.empty() || entry.first.starts_with(names_.text) || entry.first == names_.head;
    });
    return others;
  }

  // Refuses tensors that the model does not use, except those that can be derived from others.
  template <class T>
  void check_all_used(const Table<T>& table, const Config& c) const {
    std::set<const Tensor*> used;
    for (const auto& [name, tensor] : other_parts()) used.insert(tensor);
    const std::vector<const char*>& unused = family_of(c).modules.unused;
    for (const Entry<T>& e : table) {
      used.insert(&at(e.parameter.name));
      for (const char* part : kNf4Parts)
        if (e.quantised) used.insert(find(e.parameter.name + part));
    }
    for (const auto& [name, tensor] : tensors) {
      const auto ends = [&name = name](const char* end) { return name.ends_with(end); };
      if (used.contains(tensor) || ends("rotary_emb.inv_freq") || std::ranges::any_of(unused, ends)) continue;
      require(name == names_.head && c.tied, tensor->where,
              " is not used by the model of config.json, so results would differ without it; do they belong together?");
      const Tensor& embedding = this->embedding(c);
      require(tensor->dtype == embedding.dtype && tensor->shape == embedding.shape &&
                  std::memcmp(tensor->data, embedding.data, tensor->bytes) == 0,
              tensor->where, " differs from the embedding, but config.json says that they are tied; set ",
              "\"tie_word_embeddings\" to false", c.root.empty() ? "" : ", in \"text_config\" too");
      forget(*tensor), forget(embedding);
    }
  }

 private:
  void open_shards(const fs::path& index) {
    const Json json = parse_json_file(index);
    require(json.is_object() && json.contains("weight_map") && json["weight_map"].is_object(), index.string(),
            ": has no \"weight_map\"; is the file complete?");
    std::map<std::string, std::size_t> shard_of;
    for (const auto& [name, value] : json["weight_map"].items()) {
      if (!value.is_string()) fail(index.string(), ": ", quote(name), ": ", shown(value), " is not the name of a file");
      const auto shard = value.get<std::string>();
      require(fs::path(shard).filename() == shard && shard.ends_with(".safetensors"), index.string(), ": ",
              quote(shard), " is not the name of a safetensors file in the same directory");
      const auto [found, is_new] = shard_of.try_emplace(shard, files.size());
      require(!is_new || is_there(dir / shard), (dir / shard).string(), ": there is no such file, but ",
              index.filename().string(), " names it; download it again");
      if (is_new) files.emplace_back(dir / shard);
      tensors[name] = &files[found->second].at(name);
    }
    for (const SafetensorsFile& file : files) {
      for (const auto& [name, tensor] : file.tensors()) {
        require(tensors.contains(name) && tensors[name] == &tensor, tensor.where, " is not listed in ", index.string(),
                "; are the files of one model?");
      }
    }
    require(!tensors.empty(), index.string(), ": names no tensors; download it again");
  }

  // A multimodal model's text model is where its token embedding is.
  void find_text_model() {
    const auto find = [&](const std::string& end) {
      std::string found;
      for (const auto& [name, tensor] : tensors) {
        if ((name != end && !name.ends_with("." + end)) || name.starts_with(kMtp)) continue;
        require(found.empty(), dir.string(), ": has several ", end, ", ", quote(found), " and ", quote(name),
                ", so its text model is not found; save the text model alone");
        found = name;
      }
      return found;
    };
    const std::string tokens = "embed_tokens.weight", found = find(tokens), head = find("lm_head.weight");
    require(!found.empty(), dir.string(), ": no tensor's name ends with ", quote(tokens),
            ", so it has no text model; do its files belong to this config.json?");
    names_.text = found.substr(0, found.size() - tokens.size());
    if (!head.empty()) names_.head = head;
  }

  fs::path dir;
  std::vector<SafetensorsFile> files;
  std::map<std::string, const Tensor*> tensors;
  std::map<std::string, Tensor> joined_;
  StoredNames names_;
  const Config* gguf_ = nullptr;  // of a GGUF file
};

}  // namespace streambp
