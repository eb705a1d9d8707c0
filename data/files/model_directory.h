// A Hugging Face model directory: config.json, the tokenizer's files, and the weights (model_files.h). A model is saved as it
// was loaded: the same tensor names and types, config.json and tokenizer.
#pragma once

#include "data/files/config.h"
#include "data/files/model_files.h"
#include "data/files/tensors.h"

namespace streambp {

constexpr std::size_t kLargestShard = 5'000'000'000;

// Does a multimodal model's config.json say whether its embeddings are tied?
inline bool says_tied(const Json& config) {
  const char* const name = "tie_word_embeddings";
  return config.contains(name) || (config.contains("text_config") && config["text_config"].contains(name));
}

// Reads a config.json, or the one in a model directory.
inline Config read_config(fs::path path) {
  if (is_gguf(path)) return gguf_model(path).config;
  const bool is_directory = fs::is_directory(path);
  const fs::path file = is_directory ? path / "config.json" : path;
  Config c = config_from_json(parse_json_file(file), file.string());
  // Multimodal models: versions of transformers disagree on the default of tie_word_embeddings. Without the field, a head
  // that is not stored is tied.
  if (is_directory && !c.root.empty() && !c.tied && !says_tied(parse_json_file(file)))
    c.tied = !ModelFiles(path, c.root).find("lm_head.weight");
  return c;
}

// A small file of a model directory. Checkpoints contain copies of it, so a link may not lead to a private file: it
// must stay in the directory, or in the blobs of a hub's cache (models--NAME/snapshots/COMMIT/FILE -> ../../blobs/HASH).
inline std::string read_model_file(const fs::path& file) {
  if (is_gguf(file.parent_path())) return read_small_file(file);
  regular_file_size(file);
  const fs::path home = fs::canonical(file.parent_path()), target = fs::canonical(file);
  const fs::path snapshots = home.parent_path(), blobs = snapshots.parent_path() / "blobs";
  const auto within = [&](const fs::path& directory) {
    return std::mismatch(directory.begin(), directory.end(), target.begin(), target.end()).first == directory.end();
  };
  require(within(home) || (snapshots.filename() == "snapshots" && within(blobs)), file.string(), ": is a link to ",
          target.string(), ", outside the model directory; put a copy there instead, because checkpoints would ",
          "contain the file");
  return read_file(file);
}

// What saving needs in addition to the weights to write a model as it was loaded.
struct ModelLayout {
  std::string config;                         // the text of config.json
  std::map<std::string, std::string> others;  // contents of the other small files, by name
  StoredNames names;
  std::map<std::string, std::string> dtypes;         // by parameter name
  std::shared_ptr<const ModelFiles> source = {};     // of a model with tensors that are copied
  std::map<std::string, const Tensor*> copied = {};  // the tensors of its other parts
  // With an adapter_config.json, checkpoints hold adapters only, for the model in this directory.
  std::string adapter_config = "";
  fs::path base = "";

  // For a new model. transformers' default pad token may be outside its vocabulary.
  explicit ModelLayout(const Config& c) {
    Json json = config_to_json(c);
    json["pad_token_id"] = nullptr;
    config = json.dump(2) + "\n";
    names.pieces = pieces_of_experts(c);
  }

  explicit ModelLayout(const fs::path& dir) : config(read_model_file(dir / "config.json")) {
    for (const char* name :
         {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json",
          "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
          "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"}) {
      if (has_file(dir / name)) others[name] = read_model_file(dir / name);
    }
    const Config c = read_config(dir);
    source = std::make_shared<ModelFiles>(dir, c.root);
    names = source->names();
    copied = source->other_parts();
    Tensors<float> none(c);
    const Table<float> all = table(c, none), stored = source->stored(all);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Tensor& tensor = source->at(stored[i].parameter.name);
      dtypes[all[i].parameter.name] = size_of_block(tensor.layout.type).weights() > 1 ? "BF16" : tensor.dtype;
    }
    if (copied.empty() && !c.mxfp4) source = {};
  }

  // Changes the type of the saved tensors.
  void store_as(const std::string& dtype) {
    const std::map<std::string, const char*> types = {{"F32", "float32"}, {"F16", "float16"}, {"BF16", "bfloat16"}};
    for (const auto& [name, tensor] : copied) {
      require(
          !name.ends_with(kNf4State), tensor->where,
          ": the other parts of the model are in 4 bits too; load them in transformers, dequantise, and merge there");
    }
    for (auto& [name, type] : dtypes) type = dtype;
    const auto has_dtype = [](const JsonMember& member) { return member.key == "dtype"; };
    const char* field = std::ranges::any_of(members_of(config), has_dtype) ? "dtype" : "torch_dtype";
    config = with_member(without_member(config, "quantization_config"), field, types.at(dtype));
  }

  // Experts in MXFP4 become numbers of this type.
  void unpack_experts(const std::string& dtype) {
    for (auto& [name, type] : dtypes) {
      if (type != kMxfp4) continue;
      type = dtype;
      config = without_member(config, "quantization_config");
    }
  }

  // Refuses types that cannot be saved, before a run starts.
  void require_writable(const Config& c) const {
    for (const auto& [name, type] : dtypes) {
      if (c.keeps_mxfp4() && type == kMxfp4) continue;  // copied
      require(type != kMxfp4, "the experts ", quote(name), " are trained, so they cannot be saved in ", kMxfp4,
              "; choose bf16 or f32 with --save-dtype, or train other parts with --lora or --train");
      require(type == "F32" || type == "F16" || type == "BF16", "the weights ", quote(name), " have the type ", type,
              ", which cannot be saved; choose float32, float16 or bfloat16 with --save-dtype");
    }
    for (const auto& [name, tensor] : copied)
      require(dtype_size(tensor->dtype) > 0, tensor->where, ": has the type ", tensor->dtype,
              ", which cannot be saved; convert it in transformers");
  }
  // Whether all tensors were loaded from float32.
  bool holds_float32() const { return !dtypes.empty() && !narrows<float>(); }
  // Whether saving values of type T in this type loses bits.
  template <class T>
  static bool narrows(const std::string& dtype) {
    if (dtype == kMxfp4) return false;  // copied
    return dtype_size(dtype) < static_cast<Index>(sizeof(T)) || (sizeof(T) == 2 && dtype == "F16");
  }
  template <class T>
  bool narrows() const {
    return std::ranges::any_of(dtypes, [](const auto& entry) { return narrows<T>(entry.second); });
  }
  // The tensors that lose bits when they are saved.
  template <class T>
  Table<T> narrowed(Table<T> table) const {
    std::erase_if(table, [&](const Entry<T>& e) {
      const auto dtype = dtypes.find(e.parameter.name);
      if (dtype == dtypes.end()) return true;
      return e.wide ? !narrows<Accumulator<T>>(dtype->second) : !narrows<T>(dtype->second);
    });
    return table;
  }
};

// Copies the weights of a tensor's parts as they are in a GGUF file.
template <class Device, class T>
void load_blocks(Device& dev, const Tensor& tensor, const Table<T>& parts) {
  Index before = 0;
  for (const Entry<T>& e : parts) {
    const Parameter& p = e.parameter;
    Blocks& q = e.quantised->blocks;
    q.columns = tensor.layout.columns;
    const bool finite = fill(dev, q.bytes, [&](Rows rows, std::uint8_t* out) {
      std::vector<float> row(static_cast<std::size_t>(p.cols));
      bool good = true;
      for (Index i = rows.begin; i < rows.end; ++i, out += q.bytes.cols) {
        const std::uint8_t* from = row_of_blocks(tensor, stored_line(p, tensor.shape, before, i));
        std::memcpy(out, from, static_cast<std::size_t>(q.bytes.cols));
        decode_row(q.type, from, p.cols, {}, row.data());
        good = good && all_finite(row.data(), p.cols);
      }
      return good;
    });
    require(finite, tensor.where, " holds a NaN or an infinity; the file is damaged, download it again");
    before += p.length();
  }
  forget(tensor);
}

// Loads the weights of a model directory. Returns their size in the files.
template <class Device, class T>
std::size_t load_model(Device& dev, const fs::path& dir, Model<T>& model) {
  const ModelFiles files(dir, model.config.root);
  const auto parameters = files.stored(without_adapters(table(model.config, model.weights)));
  files.check_all_used(parameters, model.config);
  read_tensors(dev, files, "", plain(parameters), model.shards);
  std::size_t bytes = 0;
  for (const Table<T>& parts : by_stored_tensor(parameters)) {
    const Tensor& tensor = files.at(parts.front().parameter.name);
    bytes += tensor.bytes;
    if (!parts.front().quantised) continue;
    if (parts.front().quantised->blocks) {
      load_blocks(dev, tensor, parts);
      continue;
    }
    const std::vector<FourBitNumbers> numbers = four_bits_of(files, parts);
    for (std::size_t i = 0; i < parts.size(); ++i) upload(dev, *parts[i].quantised, numbers[i]);
    forget(tensor);
  }
  MappedFile::require_intact();
  return bytes;
}

// A tensor of a saved model: its parameters, and its type in the file; or a copy of another one.
template <class T>
struct StoredTensor {
  Table<T> parts;
  std::string name, dtype;
  const Tensor* copied = nullptr;

  std::vector<Index> shape() const { return copied ? copied->shape : stored_shape(parts); }
};

// Distributes a model's tensors, in their order, over shards of at most `limit` bytes.
template <class T>
std::vector<std::vector<StoredTensor<T>>> into_shards(const Table<T>& tensors, const ModelLayout& layout,
                                                      std::size_t limit) {
  std::vector<std::vector<StoredTensor<T>>> shards;
  std::size_t filled = 0;
  const auto add = [&](StoredTensor<T> stored) {
    const auto bytes = static_cast<std::size_t>(element_count(stored.name, stored.shape()) * dtype_size(stored.dtype));
    if (shards.empty() || filled + bytes > limit) shards.emplace_back(), filled = 0;
    filled += bytes;
    shards.back().push_back(std::move(stored));
  };
  for (const Table<T>& parts : by_stored_tensor(tensors)) {
    const std::string& name = parts.front().parameter.name;
    const auto dtype = layout.dtypes.find(name);
    if (dtype != layout.dtypes.end() && dtype->second == kMxfp4) {
      const std::vector<Tensor>& pieces = layout.source->at(name).pieces;
      for (const auto i : {0, 1}) add({{}, layout.names.of(name) + kMxfp4Parts[i], pieces[i].dtype, &pieces[i]});
      continue;
    }
    add({parts, name, dtype == layout.dtypes.end() ? dtype_name(parts) : dtype->second});
  }
  for (const auto& [name, tensor] : layout.copied) add({{}, name, tensor->dtype, tensor});
  return shards;
}

// Saves a model to an existing directory, in files of at most `limit` bytes. write(writer, name, tensor) adds a tensor to
// a file. If ranks share the weights, all of them call this; rank 0 writes, and the others have an empty directory.
template <class T, class F>
void save_tensors(const fs::path& dir, const Table<T>& tensors, const ModelLayout& layout, std::size_t limit,
                  F&& write) {
  const auto shards = into_shards(tensors, layout, limit);
  Index total = 0;
  Json weight_map = Json::object();
  for (std::size_t i = 0; i < shards.size(); ++i) {
    char name[64] = "model.safetensors";
    if (shards.size() > 1) std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, shards.size());
    SafetensorsWriter writer(dir.empty() ? dir : dir / name, {{"format", "pt"}}, layout.names.pieces);
    for (const StoredTensor<T>& stored : shards[i]) {
      const std::string stored_name = stored.copied ? stored.name : layout.names.of(stored.name);
      total += element_count(stored.name, stored.shape()) * dtype_size(stored.dtype);
      if (stored.copied) {
        writer.add(stored_name, stored.dtype, stored.shape(), stored.copied->data, stored.copied->bytes);
      } else {
        write(writer, stored_name, stored);
      }
    }
    for (const auto& [tensor, entry] : writer.header().items())
      if (tensor != "__metadata__") weight_map[tensor] = name;
    writer.finish();
  }
  if (dir.empty()) return;
  if (shards.size() > 1) {
    const Json index = {{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}};
    write_file_atomically(dir / "model.safetensors.index.json", index.dump(2) + "\n");
  }
  for (const auto& [name, contents] : layout.others) write_file_atomically(dir / name, contents);
  write_file_atomically(dir / "config.json", layout.config);
}

struct Saving {
  std::size_t limit = kLargestShard;  // of a file
  Group ranks = {};                   // that hold shards of the weights
  Table<float> masters = {};          // their values replace those of the weights
};
template <class Device, class T>
void save_model(Device& dev, const fs::path& dir, Model<T>& model, const ModelLayout& layout, const Saving& s = {}) {
  std::map<std::string, Table<float>> exact;
  for (const Table<float>& parts : by_stored_tensor(s.masters)) exact[parts.front().parameter.name] = parts;
  save_tensors(dir, without_adapters(table(model.config, model.weights)), layout, s.limit,
               [&](SafetensorsWriter& writer, const std::string& name, const StoredTensor<T>& stored) {
                 const auto master = exact.find(stored.name);
                 if (master == exact.end()) return write_tensor(dev, writer, name, stored.parts, stored.dtype, s.ranks);
                 write_tensor(dev, writer, name, master->second, stored.dtype, s.ranks);
               });
}

}  // namespace streambp
