// Fuzz tests of safetensors files and models, and of the fuzzer itself. The other parsers are in fuzz_*.cpp.
#include "data/files/model_directory.h"
#include "tests/fuzz_fixture.h"
#include "tests/golden.h"

// Fuzzed parsers run under a limit of memory.
void* operator new(std::size_t bytes) {
  if (void* block = streambp::Heap::allocate(bytes)) return block;
  throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return streambp::Heap::allocate(bytes); }
void operator delete(void* block) noexcept { streambp::Heap::release(block); }
void operator delete(void* block, std::size_t) noexcept { streambp::Heap::release(block); }

namespace streambp {
namespace {

// --- The fuzzer finds planted bugs ---

class FuzzerFinds : public testing::Test {
 protected:
  // Runs `bug` when damage has changed a digit to 9.
  template <class Bug>
  void expect(const std::string& said, Bug bug, FuzzLimits limits = {}) {
    const FuzzTarget target{
        "planted", {{{"a.json", R"({"size": 123456, "list": [1, 2, 3]})"}}}, [&](const Files& files) {
          require(files.contains("a.json"), "refused");
          if (files.at("a.json").find("9") != std::string::npos) bug();
        }};
    const FuzzReport found = Fuzzer(target, limits).run(0, 1000);
    EXPECT_PRED2(contains, found.failure, said);
    EXPECT_GT(found.cases, 0);
    EXPECT_LT(found.cases, 1000);
    const FuzzReport alone = Fuzzer(target, limits).run(found.cases, 1);  // that case again
    EXPECT_EQ(alone.failure, found.failure);
    EXPECT_EQ(Fuzzer(target, limits).run(0, found.cases).failure, "");
  }
};

TEST_F(FuzzerFinds, OtherExceptions) {
  expect("vector", [] { std::vector<int>().at(3); });
  expect("other than a std::exception", [] { throw 3; });
  expect("accepted, but false: round", [] { ensure(false, "round"); });
}
TEST_F(FuzzerFinds, Crashes) {
  expect("dies of signal 9", [] { raise(SIGKILL); });
  expect("ends with exit code 7", [] { _exit(7); });
}
TEST_F(FuzzerFinds, EndlessLoops) {
  expect("no progress",
         [] {
           for (volatile bool forever = true; forever;) continue;
         },
         {.seconds = 0.5});
}
TEST_F(FuzzerFinds, TooMuchMemory) {
  expect("bad_alloc", [] { std::vector<char>(2'000'000); }, {.bytes = 1'000'000});
  const FuzzTarget thrifty{"thrifty", {{{"a", "1"}}}, [](const Files&) { std::vector<char>(900'000); }};
  const FuzzReport report = Fuzzer(thrifty, {.bytes = 1'000'000}).run(0, 10);
  EXPECT_EQ(report.failure, "");
  EXPECT_GE(report.largest, 900'000u);
}

// --- Safetensors ---

// Reads everything in a file.
void use(const SafetensorsFile& file, std::size_t size) {
  std::size_t total = 0;
  const std::byte *begin = nullptr, *end = nullptr;
  for (const auto& [name, tensor] : file.tensors()) {
    total += tensor.bytes;
    if (!begin || tensor.data < begin) begin = tensor.data;
    if (!end || tensor.data + tensor.bytes > end) end = tensor.data + tensor.bytes;
    ensure(tensor.count == element_count(name, tensor.shape), "the count is that of the shape");
    const Index width = dtype_size(tensor.dtype);
    if (width == 0) continue;
    ensure(tensor.bytes == static_cast<std::size_t>(tensor.count * width), "the bytes are those of the shape");
    if (is_real(tensor)) {
      std::vector<double> values(static_cast<std::size_t>(tensor.count));
      read(tensor, values.data());
    } else {
      std::vector<std::int64_t> values(static_cast<std::size_t>(tensor.count));
      read(tensor, values.data());
    }
    forget(tensor);
  }
  ensure(static_cast<std::size_t>(end - begin) == total && total + 8 <= size, "tensors lie in the file");
  ensure(!file.find("no such tensor"), "there is no tensor of this name");
}

TEST_F(Fuzz, Safetensors) {
  std::vector<Files> seeds;
  const auto add = [&](const std::function<void(SafetensorsWriter&)>& fill,
                       std::map<std::string, std::string> metadata) {
    seeds.push_back({{"a.safetensors", written([&](const fs::path& path) {
                        SafetensorsWriter writer(path, metadata);
                        fill(writer);
                        writer.finish();
                      })}});
  };
  const std::vector<char> zeros(4096);
  add([](auto&) {}, {});
  add(
      [&](auto& w) {
        w.add("empty", "F32", {3, 0}, zeros.data(), 0), w.add("scalar", "F64", {}, zeros.data(), 8);
      },
      {{"format", "pt"}});
  add(
      [&](auto& w) {
        for (const char* type : {"F64", "F32", "F16", "BF16", "I64", "I32", "U8"}) {
          w.add(type, type, {2, 3}, zeros.data(), static_cast<std::size_t>(6 * dtype_size(type)));
        }
      },
      {});
  const SafetensorsFile golden(golden_folder() / (golden_cases().front() + ".safetensors"));
  add(
      [&](auto& w) {
        for (const auto& [name, tensor] : golden.tensors()) {
          if (tensor.bytes < 200) w.add(name, tensor.dtype, tensor.shape, tensor.data, tensor.bytes);
        }
      },
      golden.metadata());
  fuzz(seeds, [&](const Files& files) {
    const fs::path path = (*folder)(files) / "a.safetensors";
    try {
      use(SafetensorsFile(path), files.contains("a.safetensors") ? files.at("a.safetensors").size() : 0);
    } catch (const Error& error) {
      ensure(contains(error.what(), path.string() + ":"), "the error names the file");
      throw;
    }
  });
}

// --- Models ---

std::vector<Files> configurations() {
  std::vector<Files> seeds;
  for (const Family& family : families()) seeds.push_back({{"config.json", config_to_json(family.config).dump()}});
  for (const std::string& name : golden_cases()) {  // as written by transformers
    const SafetensorsFile file(golden_folder() / (name + ".safetensors"));
    seeds.push_back({{"config.json", file.metadata().at("config")}});
  }
  return seeds;
}

TEST_F(Fuzz, Configuration) {
  fuzz(configurations(), [&](const Files& files) {
    const Config c = read_config((*folder)(files));
    ensure(parameter_count(c) > 0, "a model has parameters");
    for (Index l = 0; l < c.layers; ++l) ensure(c.attention(l).window >= 0, "windows are not negative");
    config_to_json(c);
  });
}

TEST_F(Fuzz, ModelDirectory) {
  std::vector<Files> seeds;
  const auto add = [&](const Config& c, const std::string& prefix, const std::string& dtype, std::size_t shard) {
    Cpu dev(std::size_t{1} << 20);
    Model<float> model{c, Tensors<float>(c)};
    allocate(dev, table(c, model.weights), Kind::weights);
    initialise(dev, model, 1);
    ModelLayout layout(c);
    layout.names.prefix = prefix;
    if (!c.root.empty()) {  // a multimodal model
      layout.config = Json{{"model_type", "gemma3"}, {"text_config", config_to_json(c)}}.dump();
      layout.names = {"", c.root, "language_model.model.", "language_model.lm_head.weight"};
    }
    for (const auto& e : table(c, model.weights)) layout.dtypes[e.parameter.name] = dtype;
    fs::create_directories(dir / "model");
    save_model(dev, dir / "model", model, layout, {shard});
    seeds.push_back(files_in(dir / "model"));
    fs::remove_all(dir / "model");
  };
  //                 vocabulary hidden layers heads kv dim mlp length tied
  add(make_config("gpt2", {5, 4, 1, 2, 2, 2, 3, 7, true}), "transformer.", "F32", kLargestShard);
  add(make_config("gpt2", {5, 4, 1, 1, 1, 4, 3, 7, true}), "", "F16", 300);
  add(make_config("llama", {5, 4, 1, 2, 1, 2, 3, 0, false}), "", "BF16", 100);
  add(make_config("qwen2", {5, 4, 2, 2, 1, 2, 3, 0, true}), "", "F32", 600);
  add(make_config("gemma3", {5, 4, 2, 2, 1, 2, 3, 0, true}), "", "F32", kLargestShard);
  Config text = make_config("gemma3", {5, 4, 2, 2, 1, 2, 3, 0, false});
  text.root = "model.language_model.";
  add(text, "", "BF16", kLargestShard);
  fuzz(seeds, [&](const Files& files) {
    const fs::path path = (*folder)(files);
    ModelLayout layout(path);
    layout.store_as("BF16");
    const Config c = read_config(path);
    Model<float> model{c, Tensors<float>(c)};
    const auto parameters = table(c, model.weights);
    const ModelFiles tensors(path, c.root);
    tensors.check_all_used(parameters, c);
    for (const auto& parts : by_stored_tensor(parameters)) {  // the arena is as large as the configuration says
      require(tensors.at(parts.front().parameter.name).shape == stored_shape(parts), "another shape");
    }
    Cpu dev(static_cast<std::size_t>(4 * parameter_count(c)) + Arena::kAlignment * parameters.size());
    allocate(dev, parameters, Kind::weights);
    load_model(dev, path, model);
  });
}

}  // namespace
}  // namespace streambp
