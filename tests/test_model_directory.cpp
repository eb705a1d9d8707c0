// Model directories: every type and layout round-trips, and errors name the file and the tensor.
#include "data/files/model_directory.h"
#include "tests/commands.h"

namespace streambp {
namespace {

// A model on the host, with its memory.
struct Held {
  Cpu dev{std::size_t{1} << 22};
  Trainer<Cpu, float> trainer;
  explicit Held(const Config& c) : trainer(dev, c, 1, OptimizerKind::none) {}
  Model<float>& model() { return trainer.model; }
  bool operator==(Held& other) {
    return host_gradient(dev, model().config, model().weights) ==
           host_gradient(other.dev, model().config, other.model().weights);
  }
};

class ModelDirectories : public Commands {
 protected:
  // A model directory with random weights in this type.
  Config make(const std::string& family, const std::string& dtype, std::size_t shard = kLargestShard) {
    const bool gpt2 = family == "gpt2";
    const Config c = make_config(family, {40, 24, 2, 4, gpt2 ? 4 : 2, 6, 36, 64, gpt2});
    Held held(c);
    held.trainer.initialise(7, 0.1);
    ModelLayout layout(c);
    Tensors<float> none(c);
    for (const auto& e : table(c, none)) layout.dtypes[e.parameter.name] = dtype;
    layout.store_as(dtype);
    save_model(held.dev, dir, held.model(), layout, {shard});
    return c;
  }
  std::string refusal(const Config& c) {
    return error_of([&] {
      Held held(c);
      load_model(held.dev, dir, held.model());
    });
  }
  void expect_refusal(const Config& c, const std::string& said) { EXPECT_PRED2(contains, refusal(c), said); }
  // Writes model.safetensors again with one more tensor, or with one of them changed.
  template <class V = float>
  void rewrite(const std::string& name, const std::string& dtype, const std::vector<std::int64_t>& shape,
               const std::vector<V>& values) {
    const fs::path path = dir / "model.safetensors";
    {
      const SafetensorsFile file(path);
      SafetensorsWriter writer(dir / "new.safetensors", {});
      for (const auto& [other, tensor] : file.tensors()) {
        if (other != name) writer.add(other, tensor.dtype, tensor.shape, tensor.data, tensor.bytes);
      }
      if (!values.empty()) writer.add(name, dtype, shape, values.data(), values.size() * sizeof(V));
      writer.finish();
    }
    fs::rename(dir / "new.safetensors", path);
  }
};

TEST_F(ModelDirectories, RoundTripInEveryTypeInOneFileOrInShards) {
  for (const char* family : {"gpt2", "qwen3", "gemma3", "mixtral", "granitemoe", "lfm2_moe", "gpt_oss"}) {
    for (const char* dtype : {"F32", "BF16", "F16"}) {
      for (const std::size_t shard : {kLargestShard, std::size_t{3000}}) {
        fs::remove_all(dir);
        fs::create_directories(dir / "again");
        const Config c = make(family, dtype, shard);
        write_file_atomically(dir / "tokenizer.json", "{\"its\": \"own\"}");
        EXPECT_EQ(fs::exists(dir / "model.safetensors"), shard == kLargestShard);
        Held held(c);
        load_model(held.dev, dir, held.model());
        save_model(held.dev, dir / "again", held.model(), ModelLayout(dir), {shard});
        std::size_t compared = 0;
        for (const auto& entry : fs::directory_iterator(dir)) {
          if (!entry.is_regular_file()) continue;
          EXPECT_EQ(read_file(entry.path()), read_file(dir / "again" / entry.path().filename())) << entry.path();
          ++compared;
        }
        EXPECT_GE(compared, shard == kLargestShard ? 3u : 6u);
      }
    }
  }
}

TEST_F(ModelDirectories, WidensAndNarrows) {
  const Config c = make("llama", "F32");
  Held held(c), narrow(c);
  load_model(held.dev, dir, held.model());
  ModelLayout layout(dir);
  EXPECT_FALSE(layout.narrows<float>());
  layout.store_as("BF16");
  EXPECT_TRUE(layout.narrows<float>());
  EXPECT_FALSE(layout.narrows<BFloat16>());
  fs::create_directories(dir / "bf16");
  save_model(held.dev, dir / "bf16", held.model(), layout);
  load_model(narrow.dev, dir / "bf16", narrow.model());
  EXPECT_FALSE(held == narrow);
  for (float* x = held.model().weights.embedding.tokens.data; x < held.model().weights.embedding.tokens.data + 40 * 24;
       ++x) {
    EXPECT_EQ(float(BFloat16(*x)),
              narrow.model().weights.embedding.tokens.data[x - held.model().weights.embedding.tokens.data]);
  }
  EXPECT_PRED2(contains, read_file(dir / "bf16/config.json"), "\"torch_dtype\": \"bfloat16\"");

  // the rest of config.json stays as it is, however long
  Json labels;
  for (int i = 0; i < 100'000; ++i) labels[std::to_string(i)] = "label";
  const std::string rest = "{ \"id2label\":" + labels.dump() + ",\n \"quantization_config\": {},";
  ModelLayout large(c);
  large.config = rest + " \"dtype\" : \"float32\"}";
  large.store_as("F16");
  EXPECT_TRUE(large.config == rest.substr(0, rest.find("\"quant")) + "\"dtype\" : \"float16\"}");

  // values out of range are not written as infinity
  held.model().weights.norm.weight(0, 3) = 1e6f;
  layout.store_as("F16");
  fs::create_directories(dir / "f16");
  EXPECT_THROW(save_model(held.dev, dir / "f16", held.model(), layout), Error);
  EXPECT_FALSE(fs::exists(dir / "f16/model.safetensors"));
}

TEST_F(ModelDirectories, Float16ConversionMatchesTheProcessor) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto ours = Float16(std::bit_cast<Float16>(static_cast<std::uint16_t>(bits)));
    const auto theirs = std::bit_cast<_Float16>(static_cast<std::uint16_t>(bits));
    if (theirs != theirs) {
      EXPECT_NE(static_cast<float>(ours), static_cast<float>(ours));
      continue;
    }
    EXPECT_EQ(static_cast<float>(ours), static_cast<float>(theirs));
    EXPECT_EQ(Float16(static_cast<float>(theirs)).bits, bits);
  }
  for (std::uint64_t i = 0; i < 2'000'000; ++i) {  // any float32, half of them within float16's range
    auto bits = static_cast<std::uint32_t>(Random(1).below(std::uint64_t{1} << 32, i));
    if (i % 2) bits = (bits & 0x807fffffu) | (95 + bits % 50) << 23;
    const float x = std::bit_cast<float>(bits);
    if (x != x) continue;
    ASSERT_EQ(Float16(x).bits, std::bit_cast<std::uint16_t>(static_cast<_Float16>(x))) << x;
  }
}

TEST_F(ModelDirectories, NamesWithGpt2sPrefixStay) {
  const Config c = make("gpt2", "F32");
  {
    const SafetensorsFile file(dir / "model.safetensors");
    SafetensorsWriter writer(dir / "new.safetensors", {});
    for (const auto& [name, tensor] : file.tensors()) {
      writer.add("transformer." + name, tensor.dtype, tensor.shape, tensor.data, tensor.bytes);
    }
    const std::vector<float> mask(16);
    writer.add("transformer.h.0.attn.bias", "F32", {1, 1, 4, 4}, mask.data(), 64);  // can be derived, so it is not kept
    writer.finish();
  }
  fs::rename(dir / "new.safetensors", dir / "model.safetensors");
  Held held(c);
  load_model(held.dev, dir, held.model());
  fs::create_directories(dir / "again");
  save_model(held.dev, dir / "again", held.model(), ModelLayout(dir));
  const SafetensorsFile before(dir / "model.safetensors"), after(dir / "again/model.safetensors");
  EXPECT_EQ(before.tensors().size(), after.tensors().size() + 1);
  for (const auto& [name, tensor] : after.tensors()) {
    EXPECT_EQ(std::memcmp(tensor.data, before.at(name).data, tensor.bytes), 0) << name;
  }
}

TEST_F(ModelDirectories, MayHoldATiedHeadThatEqualsTheEmbedding) {
  const Config c = make("gpt2", "F32");
  auto embedding = numbers<float>(SafetensorsFile(dir / "model.safetensors").at("wte.weight"));
  rewrite("lm_head.weight", "F32", {40, 24}, embedding);
  EXPECT_EQ(refusal(c), "");
  embedding[5] += 1;
  rewrite("lm_head.weight", "F32", {40, 24}, embedding);
  expect_refusal(c, "differs from the embedding");
}

TEST_F(ModelDirectories, WithWrongTensorsAreRefused) {
  const Config c = make("llama", "F32");
  rewrite("model.layers.0.self_attn.q_proj.lora_A", "F32", {2}, {1, 2});
  expect_refusal(c, "lora_A\" is not used by the model");
  make("llama", "F32");
  rewrite("model.norm.weight", "", {}, {});
  expect_refusal(c, "no tensor \"model.norm.weight\" among the");
  rewrite("model.norm.weight", "F32", {12}, std::vector<float>(12));
  expect_refusal(c, "model.norm.weight\" has shape [12]");
  rewrite("model.norm.weight", "I32", {24}, std::vector<float>(24));
  expect_refusal(c, "cannot read type I32 as real numbers");
  std::vector<float> bad(24, 1);
  for (const float value : {NAN, INFINITY, -INFINITY}) {
    bad[17] = value;
    rewrite("model.norm.weight", "F32", {24}, bad);
    expect_refusal(c, "model.norm.weight\" holds a NaN or an infinity");
  }
  fs::remove(dir / "model.safetensors");
  expect_refusal(c, "has neither model.safetensors nor");
}

// Checkpoints copy these files.
TEST_F(ModelDirectories, WithLinksToOtherFilesAreRefused) {
  make("qwen3", "F32");
  const fs::path snapshot = dir / "models--a--b/snapshots/0123";
  fs::create_directories(snapshot), fs::create_directories(dir / "models--a--b/blobs");
  for (const char* name : {"config.json", "model.safetensors"}) {  // as a hub's cache has them
    fs::rename(dir / name, dir / "models--a--b/blobs" / name);
    fs::create_symlink(fs::path("../../blobs") / name, snapshot / name);
  }
  write("private/secret", "secret");
  EXPECT_NO_THROW(ModelLayout{snapshot});
  fs::create_symlink(dir / "private/secret", snapshot / "vocab.json");
  EXPECT_ERROR(ModelLayout{snapshot}, "outside the model directory");
  fs::remove(snapshot / "vocab.json");
  fs::create_directory(snapshot / "vocab.json");
  EXPECT_ERROR(ModelLayout{snapshot}, "is a directory");
  fs::create_directory(dir / "adapters");
  fs::create_symlink(dir / "private/secret", dir / "adapters/adapter_config.json");
  EXPECT_ERROR(AdapterDirectory{dir / "adapters"}, "outside the model directory");
}

TEST_F(ModelDirectories, WithHugeFieldsAreRefusedBriefly) {
  const std::string wide(1'000'000, 'w');
  for (const Json& patch : {Json{{"model_type", wide}}, Json{{wide, 1}}, Json{{"hidden_size", wide}},
                            Json{{"hidden_act", wide}}, Json{{"architectures", {wide}}}}) {
    Json json = config_to_json(make_config("llama", {40, 24, 2, 4, 2, 6, 36, 64, false}));
    json.update(patch);
    const std::string said = error_of([&] { config_from_json(json, "config.json"); });
    EXPECT_PRED2(contains, said, "www...") << said.substr(0, 1000);
    EXPECT_LT(said.size(), 1200u);  // with the names of all fields or types
  }
}

TEST_F(ModelDirectories, WithABadIndexAreRefused) {
  const Config c = make("llama", "BF16", 4000);
  EXPECT_EQ(refusal(c), "");
  const fs::path index = dir / "model.safetensors.index.json";
  const std::string good = read_file(index);
  auto with = [&](auto&& change) {
    Json json = Json::parse(good);
    change(json);
    write_file_atomically(index, json.dump());
  };
  with([](Json& j) { j["weight_map"]["model.norm.weight"] = "../model.safetensors"; });
  expect_refusal(c, "not the name of a safetensors file in the same directory");
  with([](Json& j) { j["weight_map"]["model.norm.weight"] = "model-00001-of-00099.safetensors"; });
  expect_refusal(c, "no such file");
  with([](Json& j) { j["weight_map"]["model.norm.weight"] = j["weight_map"]["model.embed_tokens.weight"]; });
  expect_refusal(c, "no tensor \"model.norm.weight\"");
  with([](Json& j) { j["weight_map"].erase("model.norm.weight"); });
  expect_refusal(c, "is not listed in");
  with([](Json& j) { j["weight_map"]["model.norm.weight"] = 3; });
  expect_refusal(c, "3 is not the name of a file");
  with([](Json& j) { j.erase("weight_map"); });
  expect_refusal(c, "weight_map");
  write_file_atomically(index, good.substr(0, good.size() / 2));
  expect_refusal(c, "not valid JSON");
  write_file_atomically(index, good);
  const fs::path shard = dir / Json::parse(good)["weight_map"]["model.norm.weight"].get<std::string>();
  fs::resize_file(shard, fs::file_size(shard) - 1);
  expect_refusal(c, shard.filename().string());
}

// Heads that predict more than the next token, as some files of Qwen3.5 have them.
TEST_F(ModelDirectories, OtherHeadsAreSavedAsTheyWereLoaded) {
  const Config c = make("qwen3", "BF16");
  rewrite("mtp.embed_tokens.weight", "F32", {2, 2}, {1, 2, 3, 4});
  rewrite("mtp.fc.weight", "F32", {3}, {5, 6, 7});
  Held held(c);
  load_model(held.dev, dir, held.model());
  fs::create_directory(dir / "again");
  save_model(held.dev, dir / "again", held.model(), ModelLayout(dir));
  const SafetensorsFile before(dir / "model.safetensors"), after(dir / "again/model.safetensors");
  EXPECT_EQ(before.tensors().size(), after.tensors().size());
  for (const auto& [name, tensor] : before.tensors()) {
    EXPECT_EQ(tensor.dtype, after.at(name).dtype) << name;
    ASSERT_EQ(tensor.shape, after.at(name).shape) << name;
    EXPECT_EQ(std::memcmp(tensor.data, after.at(name).data, tensor.bytes), 0) << name;
  }
  rewrite("mmtp.fc.weight", "F32", {1}, {1});
  expect_refusal(c, "is not used by the model of config.json");
}

// Published files of OLMo Hybrid, and those that transformers writes, have other names, and a convolution in three tensors.
class OlmoHybridFiles : public ModelDirectories {
 protected:
  void SetUp() override {
    ModelDirectories::SetUp();
    c = make("olmo_hybrid", "BF16");
  }
  Config c;
  const std::string layer = "model.layers.0.", convolution = layer + "linear_attn.conv1d.weight";

  // Gives the directory's tensors the names of published files, and the convolution pieces of these lengths.
  void publish(const std::vector<Index>& lengths, bool in_attention) {
    const SafetensorsFile file(dir / "model.safetensors");
    SafetensorsWriter writer(dir / "new.safetensors", {{"format", "pt"}});
    for (const auto& [name, tensor] : file.tensors()) {
      std::string other = name;
      const auto rename = [&](const char* from, const char* to) {
        if (const auto at = other.find(from); at != other.npos) other.replace(at, std::strlen(from), to);
      };
      rename("input_layernorm", "attention_layer_norm");
      if (in_attention || name.starts_with(layer)) rename("post_attention_layernorm", "feedforward_layer_norm");
      if (name != convolution) {
        writer.add(other, tensor.dtype, tensor.shape, tensor.data, tensor.bytes);
        continue;
      }
      const std::byte* data = tensor.data;
      for (std::size_t i = 0; i < lengths.size(); ++i) {
        const std::size_t bytes = tensor.bytes / 64 * static_cast<std::size_t>(lengths[i]);
        const std::string piece = layer + "linear_attn." + "qkv"[i] + "_conv1d.weight";
        writer.add(piece, tensor.dtype, {lengths[i], 1, tensor.shape[2]}, data, bytes);
        data += bytes;
      }
    }
    writer.finish();
    fs::rename(dir / "new.safetensors", dir / "model.safetensors");
  }
};

TEST_F(OlmoHybridFiles, AreReadAndWrittenAsTheyAre) {
  ASSERT_EQ(c.delta_width(), 4 * (4 + 4 + 8));
  Held usual(c);
  load_model(usual.dev, dir, usual.model());
  const std::string before = read_file(dir / "model.safetensors");
  for (const auto& [lengths, in_attention] : {std::pair(std::vector<Index>{16, 16, 32}, false), {{22, 21, 21}, true}}) {
    write_file_atomically(dir / "model.safetensors", before);
    publish(lengths, in_attention);
    for (const std::size_t shard : {kLargestShard, std::size_t{3000}}) {
      Held held(c);
      load_model(held.dev, dir, held.model());
      EXPECT_TRUE(held == usual);
      fs::remove_all(dir / "again"), fs::create_directory(dir / "again");
      save_model(held.dev, dir / "again", held.model(), ModelLayout(dir), {shard});
      const SafetensorsFile stored(dir / "model.safetensors");
      const ModelFiles again(dir / "again");
      EXPECT_EQ(again.names().pieces, ModelFiles(dir).names().pieces);
      Held twice(c);
      load_model(twice.dev, dir / "again", twice.model());
      EXPECT_TRUE(twice == usual);
      if (shard != kLargestShard) continue;
      const SafetensorsFile written(dir / "again/model.safetensors");
      ASSERT_EQ(stored.tensors().size(), written.tensors().size());
      for (const auto& [name, tensor] : stored.tensors()) {
        ASSERT_EQ(tensor.shape, written.at(name).shape) << name;
        EXPECT_EQ(std::memcmp(tensor.data, written.at(name).data, tensor.bytes), 0) << name;
      }
    }
  }
}

TEST_F(OlmoHybridFiles, ThatAreIncompleteOrAmbiguousAreRefused) {
  publish({16, 16, 32}, false);
  EXPECT_EQ(refusal(c), "");
  const std::string piece = layer + "linear_attn.v_conv1d.weight";
  rewrite(piece, "F32", {32, 1, 4}, std::vector<float>(128));
  expect_refusal(c, "cannot be joined to");
  rewrite(piece, "F32", {}, {});
  expect_refusal(c, "but there is no \"" + piece + "\"");
  make("olmo_hybrid", "F32"), publish({16, 16, 32}, false);
  rewrite(piece, "F32", {31, 1, 4}, std::vector<float>(124));
  expect_refusal(c, "with its other pieces has shape [63,1,4], but the configuration needs [64,1,4]");
  make("olmo_hybrid", "F32"), publish({16, 16, 32}, false);
  rewrite(convolution, "F32", {64, 1, 4}, std::vector<float>(256));
  expect_refusal(c, "is there twice, also as \"" + convolution);
}

// A tensor for each expert, as published models have them, or for all.
TEST_F(ModelDirectories, ExpertsAreInOneTensorOrInOneForEach) {
  const Config c = make("qwen3_moe", "F32");
  const std::string experts = "model.layers.0.mlp.experts.", all = experts + "gate_up_proj";
  Held held(c), same(c);
  load_model(held.dev, dir, held.model());
  const ModelFiles files(dir);
  const Tensor& tensor = files.at(all);
  const Index width = c.expert_mlp;
  EXPECT_EQ(tensor.shape, (std::vector<Index>{c.experts, 2 * width, c.hidden}));
  std::vector<float> numbers(static_cast<std::size_t>(tensor.count)), up(static_cast<std::size_t>(width * c.hidden));
  read(tensor, numbers.data());
  const SafetensorsFile file(dir / "model.safetensors");
  read(file.at(experts + "3.up_proj.weight"), up.data());
  EXPECT_TRUE(std::equal(up.begin(), up.end(), numbers.begin() + 7 * width * c.hidden));
  for (Index e = 0; e < c.experts; ++e)
    for (const char* part : {".gate_proj.weight", ".up_proj.weight"})
      rewrite(experts + std::to_string(e) + part, "F32", {}, {});
  rewrite(all, "F32", tensor.shape, numbers);
  load_model(same.dev, dir, same.model());
  EXPECT_TRUE(held == same);
  rewrite(experts + "1.down_proj.weight", "F32", {}, {});
  expect_refusal(c, "but there is no \"" + experts + "1.down_proj.weight\"");
  make("qwen3_moe", "F32");
  rewrite(experts + "1.up_proj.weight", "F32", {width + 1, c.hidden}, std::vector<float>((width + 1) * c.hidden));
  expect_refusal(c, "cannot be joined to");
  make("qwen3_moe", "F32");
  rewrite(experts + "1.up_proj.weight", "F32", {}, {});
  expect_refusal(c, "but there is no \"" + experts + "1.up_proj.weight\"");
}

}  // namespace
}  // namespace streambp
