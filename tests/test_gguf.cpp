// GGUF files: against numpy's dequantisers and llama.cpp's converter (scripts/make_gguf_golden.py), and in all modes.
#include "data/files/merge.h"
#include "tests/gguf_models.h"
#include "tests/golden.h"
#include "tests/temporary.h"
#include "tests/tokenizers.h"
#include "tests/training.h"

namespace streambp {
namespace {

fs::path gguf_folder() { return golden_folder() / "gguf"; }

BlockType type_named(const std::string& name) {
  for (const GgufType& type : kGgufTypes)
    if (type.name == name) return type.type;
  return BlockType::none;
}

TEST(Blocks, HaveTheBitsOfNumpysDequantisers) {
  const SafetensorsFile golden(gguf_folder() / "blocks.safetensors");
  int types = 0;
  for (const auto& [name, tensor] : golden.tensors()) {
    if (name.find('.') != name.npos) continue;
    const auto expected = numbers<float>(golden.at(name + ".numbers"));
    std::vector<std::uint8_t> bytes = numbers<std::uint8_t>(tensor);
    std::vector<float> values(expected.size());
    Cpu dev(0);
    dequantise(dev, Matrix<float>(values.data(), 3, 512), Blocks{type_named(name), {bytes.data(), 3, tensor.shape[1]}});
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_EQ(std::bit_cast<std::uint32_t>(values[i]), std::bit_cast<std::uint32_t>(expected[i]))
          << name << ", " << i;
    ++types;
  }
  EXPECT_EQ(types, 9);
}

TEST(Blocks, AreQuantisedLikeLlamaCpp) {
  const SafetensorsFile golden(gguf_folder() / "blocks.safetensors");
  for (const std::string name : {"Q8_0", "Q4_0"}) {
    std::ostringstream out;
    write_row(out, type_named(name), numbers<float>(golden.at(name + ".from")));
    const auto expected = numbers<std::uint8_t>(golden.at(name + ".quantised"));
    EXPECT_EQ(out.str(), std::string(expected.begin(), expected.end())) << name;
  }
}

TEST(Blocks, SwappedAxesGoThereAndBack) {
  const SwappedAxes heads = {2, 3, 1}, groups = {2, 3, 4, 5};
  std::vector<Index> stored;
  for (Index i = 0; i < 6; ++i) stored.push_back(heads.stored(i));
  EXPECT_EQ(stored, (std::vector<Index>{0, 2, 4, 1, 3, 5}));
  for (const SwappedAxes& axes : {heads, groups})
    for (Index i = 0; i < 53; ++i) EXPECT_EQ(axes.original(axes.stored(i)), i);
  EXPECT_EQ(groups.stored(5 + 4), 5 + 2 * 4);
}

// --- Models of llama.cpp's converter ---

// Trains nothing: writes adapters of all linear layers, with random numbers.
void save_random_adapters(const fs::path& dir, const Config& c, const fs::path& base) {
  Cpu dev(std::size_t{1} << 27);
  Trainer<Cpu, float> trainer(dev, c, 1, OptimizerKind::none);
  load_model(dev, base, trainer.model);
  initialise_adapters(dev, trainer.model, 3, 0.05);
  const LoraSettings settings = {4, 8, false, {"all"}};
  save_adapters(dev, dir, c, trained(table(c, trainer.model.weights)), adapter_config(c, settings, base.string()));
  write_gguf_adapter(dir, c, base);
}

// llama.cpp adds 2 b a to the tensors of the base as they are in the file; a merged file has these sums.
void expect_merged(const fs::path& dir, const Config& c, const fs::path& base) {
  Merge(base, dir, c).save_gguf(dir / "merged.gguf", base, BlockType::f32);
  const GgufFile before(base), after(dir / "merged.gguf"), adapter(dir / "adapter.gguf");
  EXPECT_GE(adapter.tensors().size(), 2 * c.adapters.size());
  for (const auto& [name, tensor] : before.tensors()) {
    const auto w = numbers<float>(tensor), sum = numbers<float>(after.tensors().at(name));
    if (!adapter.tensors().contains(name + ".lora_a")) {
      EXPECT_EQ(sum, w) << name;
      continue;
    }
    const auto a = numbers<float>(adapter.tensors().at(name + ".lora_a")),
               b = numbers<float>(adapter.tensors().at(name + ".lora_b"));
    const auto cols = static_cast<std::size_t>(tensor.shape.back()), experts = a.size() / cols / 4,
               rows = w.size() / cols / experts;
    for (std::size_t i = 0; i < w.size(); i += 37) {
      double added = 0;
      for (std::size_t r = 0; r < 4; ++r)
        added += 2.0 * b[i / cols * 4 + r] * a[(i / cols / rows * 4 + r) * cols + i % cols];
      ASSERT_NEAR(sum[i], w[i] + added, 1e-6) << name << ", " << i;
    }
  }
}

class ConvertedModel : public TemporaryDirectory, public testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Golden, ConvertedModel,
                         testing::Values("llama_bias", "llama3", "qwen3", "qwen3_yarn", "gemma4", "phi3", "granite",
                                         "cohere", "olmo2", "lfm2", "qwen3_5", "qwen3_moe_all", "mixtral", "olmoe",
                                         "granitemoe", "qwen3_next", "gpt_oss", "gpt2"),
                         [](const auto& info) { return std::string(info.param); });

// Files hold float32: sums of 1 + weight, exponentials and RoPE's factors are rounded.
TEST_P(ConvertedModel, HasTheGradientOfTheModel) {
  const Golden golden(GetParam());
  const fs::path file = gguf_folder() / (GetParam() + std::string(".gguf"));
  Config c = read_config(file);
  EXPECT_EQ(std::string(c.family), golden.config.family);
  EXPECT_TRUE(c.blocks.empty());
  c.rope_scaling.longest = golden.config.rope_scaling.longest;
  c.balanced = golden.config.balanced, c.balance_factor = golden.config.balance_factor;
  const auto weights = [&](auto& dev, auto& model) { load_model(dev, file, model); };
  const double loss = golden.numbers<double>("loss")[0];
  expect_golden<double>(golden_gradient(golden.file, "grad/", golden.config), loss, 5e-6, c, golden.batch, weights);
}

TEST_P(ConvertedModel, WithAdaptersIsTheMergedModel) {
  const Golden golden(GetParam());
  const fs::path file = gguf_folder() / (GetParam() + std::string(".gguf"));
  const Config c = with_small_adapters(read_config(file));
  save_random_adapters(dir, c, file);
  expect_merged(dir, c, file);
  const auto loss_of = [&](const Config& c, auto&& weights) {
    return run_gradient<Cpu, float>(c, golden.batch, schedule_for(Mode::full, c, golden.batch.size(), kTile), weights)
        .loss;
  };
  const double base = loss_of(read_config(file), [&](auto& dev, auto& model) { load_model(dev, file, model); });
  const double loss = loss_of(c, [&](auto& dev, auto& model) {
    load_model(dev, file, model);
    initialise_adapters(dev, model, 3, 0.05);
  });
  EXPECT_GT(std::abs(loss - base), 1e-4);
  Config merged = read_config(dir / "merged.gguf");
  merged.trained = c.trained;
  EXPECT_NEAR(loss_of(merged, [&](auto& dev, auto& model) { load_model(dev, dir / "merged.gguf", model); }), loss,
              1e-5);
}

// All numbers but linear layers' are trained, and get llama.cpp's changes again.
TEST_P(ConvertedModel, TrainedNumbersAreMerged) {
  const fs::path file = gguf_folder() / (GetParam() + std::string(".gguf"));
  Config c = with_small_adapters(read_config(file));
  for (const Parameter& p : parameters_of(read_config(file), [](const Parameter& p) { return *p.group == 0; }))
    c.trained->insert(p.name);
  Cpu dev(std::size_t{1} << 27);
  Trainer<Cpu, float> trainer(dev, c, 1, OptimizerKind::none);
  load_model(dev, file, trainer.model);
  initialise_adapters(dev, trainer.model, 3, 0.05);
  const Table<float> changed = trained(table(c, trainer.model.weights));
  for (const Entry<float>& e : changed) e.with_near([&](auto matrix) { scale(dev, matrix, 1.25); });
  save_adapters(dev, dir, c, changed, adapter_config(c, {4, 8, false, {"all"}}, file.string()));
  Merge(file, dir, c).save_gguf(dir / "merged.gguf", file, BlockType::f32);
  Trainer<Cpu, float> merged(dev, read_config(dir / "merged.gguf"), 1, OptimizerKind::none);
  load_model(dev, dir / "merged.gguf", merged.model);
  std::map<std::string, std::vector<double>> expected, found;
  const auto add = [&](auto& to, const Table<float>& table) {
    for (const Entry<float>& e : table)
      e.with_near([&](auto matrix) {
        for (const double x : to_host(dev, matrix)) to[e.parameter.name].push_back(x);
      });
  };
  add(expected, without_adapters(changed)), add(found, table(merged.model.config, merged.model.weights));
  EXPECT_GE(expected.size(), 4u);
  for (const auto& [name, numbers] : expected)
    for (std::size_t i = 0; i < numbers.size(); ++i)
      ASSERT_NEAR(found.at(name)[i], numbers[i], 2e-6 * (1 + std::abs(numbers[i]))) << name << ", " << i;
}

// --- Models in blocks ---

class GgufModels : public TemporaryDirectory {
 protected:
  fs::path write_model(BlockType type, const std::string& architecture = "llama") {
    const fs::path path = dir / (std::to_string(files_++) + ".gguf");
    write_gguf_model(path, type, architecture);
    return path;
  }
  template <class T>
  void expect_bits_of_unpacked(BlockType type, const std::string& architecture = "llama") {
    const fs::path file = write_model(type, architecture);
    const Config kept = with_small_adapters(read_config(file));
    Config unpacked = kept;
    unpacked.blocks.clear();
    EXPECT_EQ(kept.blocks.size(), kept.experts > 0 ? 18u : architecture == "gpt2" ? 14u : 16u);
    const Batch batch = packed(kept, {150, 270});
    const auto weights = [&](auto& dev, auto& model) {
      load_model(dev, file, model);
      initialise_adapters(dev, model, 3, 0.05);
    };
    const auto run = [&](const Config& c, Mode mode) {
      return run_gradient<Cpu, T>(c, batch, schedule_for(mode, c, batch.size(), kTile), weights);
    };
    const GradientRun truth = run(unpacked, Mode::full);
    EXPECT_GT(truth.loss, 1);
    for (const Mode mode : kModes) expect_same_bits(run(kept, mode), truth, name(mode));
  }

 private:
  int files_ = 0;
};

TEST_F(GgufModels, HaveTheBitsOfTheirNumbers) {
  expect_bits_of_unpacked<BFloat16>(BlockType::q4_k, "qwen3moe");
  if (kSanitized) return;
  for (const BlockType type : {BlockType::q4_k, BlockType::q6_k, BlockType::q8_0}) expect_bits_of_unpacked<float>(type);
  expect_bits_of_unpacked<BFloat16>(BlockType::q5_k);
  expect_bits_of_unpacked<float>(BlockType::q6_k, "qwen3moe");
  expect_bits_of_unpacked<float>(BlockType::mxfp4, "gpt-oss");
  expect_bits_of_unpacked<BFloat16>(BlockType::q4_k, "gpt2");
}

// B's rows are in the order of the file's rows, A's columns in that of its columns.
TEST_F(GgufModels, AdaptersAndMergedModelsAreInTheFilesOrder) {
  const fs::path base = write_model(BlockType::q8_0);
  const Config c = with_small_adapters(read_config(base));
  save_random_adapters(dir, c, base);

  const GgufFile adapter(dir / "adapter.gguf");
  EXPECT_EQ(adapter.metadata().at("adapter.lora.alpha"), 8);
  EXPECT_EQ(adapter.tensors().size(), 2 * c.adapters.size());
  const SafetensorsFile peft(dir / "adapter_model.safetensors");
  const auto b = numbers<float>(adapter.tensors().at("blk.1.attn_k.weight.lora_b")),
             expected = numbers<float>(peft.at("base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"));
  for (std::size_t head : {0u, 1u})
    for (std::size_t half : {0u, 1u})
      for (std::size_t i = 0; i < 32; ++i)
        EXPECT_EQ(b[(head * 64 + 2 * i + half) * 4], expected[(head * 64 + half * 32 + i) * 4]);
  EXPECT_EQ(numbers<float>(adapter.tensors().at("blk.1.attn_v.weight.lora_b")),
            numbers<float>(peft.at("base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight")));

  expect_merged(dir, c, base);
  EXPECT_EQ(gguf_model(dir / "merged.gguf").config.blocks.size(), 2u);  // embedding and head stay as they were
}

// Of experts, gate and up are two tensors that have the same a.
TEST_F(GgufModels, AdaptersOfExpertsAreExpertByExpert) {
  const fs::path base = write_model(BlockType::q8_0, "qwen3moe");
  const Config c = with_small_adapters(read_config(base));
  Cpu dev(std::size_t{1} << 27);
  Trainer<Cpu, float> trainer(dev, c, 1, OptimizerKind::none);
  load_model(dev, base, trainer.model);
  initialise_adapters(dev, trainer.model, 3, 0.05);
  const LoraSettings settings = {4, 8, false, {"all", "experts"}};
  save_adapters(dev, dir, c, trained(table(c, trainer.model.weights)), adapter_config(c, settings, base.string()));
  write_gguf_adapter(dir, c, base);
  const GgufFile adapter(dir / "adapter.gguf");
  const MixtureWeights<float>& w = trainer.model.weights.layers[1].routed;
  const std::map<std::string, std::pair<Matrix<float>, Index>> expected = {
      {"ffn_gate_exps.weight.lora_a", {w.gate.adapter.a, 4}}, {"ffn_up_exps.weight.lora_a", {w.gate.adapter.a, 4}},
      {"ffn_down_exps.weight.lora_a", {w.down.adapter.a, 4}}, {"ffn_gate_exps.weight.lora_b", {w.gate.adapter.b, 256}},
      {"ffn_up_exps.weight.lora_b", {w.up.adapter.b, 256}},   {"ffn_down_exps.weight.lora_b", {w.down.adapter.b, 256}}};
  for (const auto& [name, numbers_and_rows] : expected) {
    const auto& [matrix, rows] = numbers_and_rows;
    const Tensor& tensor = adapter.tensors().at("blk.1." + name);
    EXPECT_EQ(tensor.shape, (std::vector<Index>{4, rows, matrix.cols})) << name;
    EXPECT_EQ(numbers<float>(tensor), to_host(dev, matrix)) << name;
  }
  expect_merged(dir, c, base);
}

// As llama.cpp: without a type it is linear, and its factor once had another name.
TEST_F(GgufModels, OlderKeysOfRopeScaling) {
  const auto config = [&](const char* key, float value) {
    write_gguf_model(dir / "rope.gguf", BlockType::q8_0, "llama", [&](GgufWriter& w) { w.add(key, value); });
    return GgufModel(dir / "rope.gguf").config;
  };
  for (const char* key : {"llama.rope.scaling.factor", "llama.rope.scale_linear"}) {
    EXPECT_EQ(config(key, 4).rope_scaling.type, RopeType::linear) << key;
    EXPECT_EQ(config(key, 4).rope_scaling.factor, 4) << key;
    EXPECT_EQ(config(key, 0).rope_scaling.type, RopeScaling().type) << key;
    EXPECT_ERROR(config(key, -2), "is -2, which is not positive");
  }
  EXPECT_ERROR(config("llama.rope.freq_base", std::numeric_limits<float>::infinity()), "is not a finite number");
}

// --- Tokenizers ---

// The metadata that a tokenizer.json becomes.
Json metadata_of(const Json& tokenizer, const char* pre) {
  std::map<std::size_t, std::string> texts;
  for (const auto& [token, id] : tokenizer["model"]["vocab"].items()) texts[id] = token;
  Json types = Json::array(), tokens = Json::array(), merges = Json::array(), scores = Json::array();
  std::set<std::size_t> special;
  for (const Json& token : tokenizer["added_tokens"])
    texts[token["id"]] = token["content"], special.insert(token["id"].get<std::size_t>());
  std::map<std::string, double> ranks;
  for (const Json& merge : tokenizer["model"]["merges"]) {
    const std::string pair =
        merge.is_array() ? merge[0].get<std::string>() + " " + merge[1].get<std::string>() : merge.get<std::string>();
    std::string whole = pair;
    whole.erase(whole.find(' ', 1), 1);
    ranks.try_emplace(whole, -static_cast<double>(merges.size()));
    merges.push_back(pair);
  }
  for (const auto& [id, text] : texts) {
    tokens.push_back(text), types.push_back(special.contains(id) ? 3 : text.starts_with("<0x") ? 6 : 1);
    scores.push_back(ranks.contains(text) ? ranks[text] : -1e9);
  }
  Json m = {{"tokenizer.ggml.model", *pre ? "gpt2" : "llama"},
            {"tokenizer.ggml.tokens", tokens},
            {"tokenizer.ggml.token_type", types},
            {"tokenizer.ggml.scores", scores},
            {"tokenizer.ggml.bos_token_id", 1},
            {"tokenizer.ggml.unknown_token_id", 0},
            {"tokenizer.ggml.eos_token_id", 2},
            {"tokenizer.chat_template", "{{ messages }}"}};
  if (*pre) m["tokenizer.ggml.merges"] = merges, m["tokenizer.ggml.pre"] = pre;
  return m;
}

TEST(GgufTokenizer, HasTheTokensOfTheTokenizerJson) {
  const std::vector<std::string> samples = {"Hello, world!  It's 12345 o'clock.\n\n\tNow?",
                                            "na\u00efve \u00dcn\u00efc\u00f6d\u00e9 \u4e2d\u6587 \U0001F600",
                                            " a  b   c\r\n x", ""};
  for (const auto& [layout, pre] : {std::pair("gpt2", "gpt-2"),
                                    {"llama3", "llama-bpe"},
                                    {"qwen2", "qwen2"},
                                    {"qwen3_5", "qwen35"},
                                    {"o200k", "gpt-4o"},
                                    {"llama2", ""}}) {
    const Json json = tokenizer_definition(layout);
    const auto texts = gguf_tokenizer(metadata_of(json, pre), "test.gguf");
    const Tokenizer tokenizer(texts.at("tokenizer.json")), original(json.dump());
    for (const std::string& sample : samples) {
      EXPECT_EQ(tokenizer.encode(sample), original.encode(sample)) << layout << ": " << sample;
      EXPECT_EQ(tokenizer.decode(tokenizer.encode(sample)), original.decode(original.encode(sample))) << layout;
    }
    EXPECT_PRED2(contains, texts.at("tokenizer_config.json"), "{{ messages }}");
    EXPECT_PRED2(contains, texts.at("generation_config.json"), "2");
  }
}

TEST(GgufTokenizer, Phi3DropsSpacesAfterSpecialTokens) {
  Json m = metadata_of(tokenizer_definition("llama2"), "");
  const auto drops = [&](const std::string& token) {
    const Json tokenizer = Json::parse(gguf_tokenizer(m, "a.gguf").at("tokenizer.json"));
    for (const Json& added : tokenizer["added_tokens"])
      if (added["content"] == token) return added["rstrip"].get<bool>();
    throw std::runtime_error(token);
  };
  EXPECT_FALSE(drops("</s>"));
  m["general.name"] = "Phi 3 Mini (Phi-3)";
  EXPECT_TRUE(drops("</s>"));
  EXPECT_FALSE(drops("<s>"));
}

TEST(GgufTokenizer, RefusesWhatItDoesNotKnow) {
  Json m = metadata_of(tokenizer_definition("gpt2"), "bloom");
  EXPECT_ERROR(gguf_tokenizer(m, "a.gguf"), "a.gguf: \"tokenizer.ggml.pre\" \"bloom\" is not supported; chatglm-bpe");
  m.erase("tokenizer.ggml.pre");
  EXPECT_ERROR(gguf_tokenizer(m, "a.gguf"), "does not say how texts are split into words");
  m["tokenizer.ggml.model"] = "bert";
  EXPECT_ERROR(gguf_tokenizer(m, "a.gguf"), "of type \"bert\" is not supported");
  m = metadata_of(tokenizer_definition("llama2"), "");
  m["tokenizer.ggml.scores"] = {1};
  EXPECT_ERROR(gguf_tokenizer(m, "a.gguf"), "1 scores for");
}

// --- Damaged files ---

TEST_F(GgufModels, DamagedFilesAreRefused) {
  const std::string good = read_file(write_model(BlockType::q4_k));
  const auto refused = [&](std::string bytes, const char* said) {
    write_file_atomically(dir / "bad.gguf", bytes);
    EXPECT_PRED2(contains, error_of([&] { GgufModel(dir / "bad.gguf"); }), said);
  };
  const auto with = [&](std::size_t at, auto number) {
    std::string bytes = good;
    std::memcpy(bytes.data() + at, &number, sizeof number);
    return bytes;
  };
  refused("", "too few");
  refused("GGML" + good.substr(4), "does not begin with GGUF");
  refused(with(4, std::uint32_t{1}), "is of version 1");
  refused(with(8, std::uint64_t{1} << 40), "claims");
  refused(with(16, std::uint64_t{10'000'000}), "10000000 keys");
  refused(with(24, ~std::uint64_t{0}), "ends in the middle of its header");
  refused(good.substr(0, 100), "ends in the middle of its header");
  refused(good.substr(0, good.size() / 2), "it is truncated");
  const std::size_t type = good.find("general.architecture") + 20;
  refused(with(type, std::uint32_t{77}), "has values of type 77");
  refused(with(type, std::uint32_t{9}), "claims");
  const std::size_t tensor = good.find("blk.0.attn_q.weight") + 19;
  refused(with(tensor, std::uint32_t{5}), "has 5 dimensions");
  refused(with(tensor + 4, ~std::uint64_t{0}), "has a size of");
  refused(with(tensor + 4, std::uint64_t{255}), "are not whole blocks of Q4_K");
  refused(with(tensor + 20, std::uint32_t{10}), "is Q2_K, which is not supported");
  refused(with(tensor + 24, std::uint64_t{32}), "not where the one before ends");
  std::string other = good;
  other[good.find("blk.0.attn_q.weight")] = 'x';
  refused(other, "has no tensor \"blk.0.attn_q.weight\"");
  EXPECT_ERROR(GgufModel(write_model(BlockType::q4_k, "bloom")),
               "architecture \"bloom\" are not supported in GGUF files");
  refused(with(good.find("llama.block_count") + 21, std::uint32_t{1}), "is not used by the model");
  const fs::path experts = write_model(BlockType::q4_k, "qwen3moe");
  for (const auto& [key, n, said] : {std::tuple("expert_count", 1 << 30, "a value is out of range"),
                                     {"expert_used_count", 0, "a value is out of range"},
                                     {"expert_used_count", 9, "cannot choose 9 of 4 experts"},
                                     {"expert_feed_forward_length", 0, "expert width 0"}}) {
    std::string bytes = read_file(experts);
    std::memcpy(bytes.data() + bytes.find(std::string("qwen3moe.") + key) + 9 + std::strlen(key) + 4, &n, 4);
    refused(bytes, said);
  }
  std::string scales = good;  // a NaN
  std::fill(scales.end() - 144, scales.end(), '\xff');
  write_file_atomically(dir / "nan.gguf", scales);
  const Config c = read_config(dir / "nan.gguf");
  Cpu dev(std::size_t{1} << 25);
  Trainer<Cpu, float> trainer(dev, with_small_adapters(c), 1, OptimizerKind::none);
  EXPECT_ERROR(load_model(dev, dir / "nan.gguf", trainer.model), "holds a NaN");
}

}  // namespace
}  // namespace streambp
