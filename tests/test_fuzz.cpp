// Every parser of files from elsewhere, fuzzed. The seeds are small valid files, made here or taken from the golden data.
//
//   STREAMBP_FUZZ_CASES   how many cases each test runs; the first of a million are what runs by default
//   STREAMBP_FUZZ_FIRST   the number of the first
#include "tests/fuzz.cuh"

#include "data/documents/sources.cuh"
#include "data/documents/tokenised.cuh"
#include "data/files/generation_config.cuh"
#include "tests/byte_model.cuh"
#include "tests/chat_models.cuh"

void* operator new(std::size_t bytes) {
  if (void* block = streambp::Heap::allocate(bytes)) return block;
  throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return streambp::Heap::allocate(bytes); }
void operator delete(void* block) noexcept { streambp::Heap::release(block); }
void operator delete(void* block, std::size_t) noexcept { streambp::Heap::release(block); }

namespace streambp {
namespace {

Index from_environment(const char* name, Index otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoll(value) : otherwise;
}

class Fuzz : public Commands {
 protected:
  void SetUp() override {
    omp_set_num_threads(1);  // OpenMP's threads do not come along into a child process
    Commands::SetUp();
    fs::remove_all(dir);
    dir = (fs::is_directory("/dev/shm") ? "/dev/shm" : dir.parent_path()) / dir.filename();  // many small writes
    fs::create_directories(dir);
    folder.emplace(dir / "case");
  }

  void fuzz(const std::vector<Files>& seeds, const std::function<void(const Files&)>& run) {
    const std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
    const FuzzTarget target{name, seeds, run};
    for (const Files& seed : seeds) {
      try {
        run(seed);
      } catch (const std::exception& error) {
        FAIL() << "a seed is not valid: " << error.what();
      }
    }
    const Index count = from_environment("STREAMBP_FUZZ_CASES", 2000);
    const Index first = from_environment("STREAMBP_FUZZ_FIRST", 0);
    Fuzzer fuzzer(target);
    const FuzzReport r = fuzzer.run(first, count);
    std::printf(
        "%-18s %ld cases in %.0f s, %ld accepted; slowest %.3f s (%ld), most memory %.2f MiB (%ld), process %zu MiB\n",
        name.c_str(), r.cases, r.seconds, r.accepted, r.slowest, r.slowest_case,
        static_cast<double>(r.largest) / (1 << 20), r.largest_case, r.resident >> 20);
    EXPECT_EQ(r.failure, "");
    EXPECT_EQ(r.cases, count);
    if (!r.failure.empty()) {
      const fs::path kept = fs::path(testing::TempDir()) / ("fuzz-" + name + "-" + std::to_string(first + r.cases));
      fs::create_directories(kept);
      for (const auto& [file, contents] : fuzzer.files(first + r.cases)) write_file_atomically(kept / file, contents);
      std::printf("its files are in %s\n", kept.c_str());
    }
    if (count < 1000) return;
    EXPECT_GT(r.accepted, 0);  // damage that is never accepted, or always, tests one check alone
    EXPECT_LT(r.accepted, count);
  }

  // The files that now lie in a directory.
  static Files files_in(const fs::path& path) {
    Files files;
    for (const auto& entry : fs::directory_iterator(path)) files[entry.path().filename()] = read_file(entry.path());
    return files;
  }
  std::string written(const std::function<void(const fs::path&)>& write) {
    write(dir / "file");
    std::string contents = read_file(dir / "file");
    fs::remove(dir / "file");
    return contents;
  }

  std::optional<CaseFolder> folder;
};

// --- The fuzzer itself finds what it is there to find ---

class FuzzerFinds : public testing::Test {
 protected:
  // Does `bug` where the damage has made a digit of the file a nine.
  template <class Bug>
  void expect(const std::string& said, Bug bug, FuzzLimits limits = {}) {
    const FuzzTarget target{
        "planted", {{{"a.json", R"({"size": 123456, "list": [1, 2, 3]})"}}}, [&](const Files& files) {
          require(files.contains("a.json"), "refused");
          if (files.at("a.json").find("9") != std::string::npos) bug();
        }};
    const FuzzReport found = Fuzzer(target, limits).run(0, 1000);
    EXPECT_TRUE(contains(found.failure, said)) << found.failure;
    EXPECT_GT(found.cases, 0);
    EXPECT_LT(found.cases, 1000);
    const FuzzReport alone = Fuzzer(target, limits).run(found.cases, 1);  // that case again
    EXPECT_EQ(alone.failure, found.failure);
    EXPECT_EQ(Fuzzer(target, limits).run(0, found.cases).failure, "");
  }
};

TEST_F(FuzzerFinds, OtherExceptions) {
  expect("vector", [] { std::vector<int>().at(3); });
  expect("no exception", [] { throw 3; });
  expect("accepted, but not so: round", [] { ensure(false, "round"); });
}
TEST_F(FuzzerFinds, Crashes) {
  expect("dies of signal 9", [] { raise(SIGKILL); });
  expect("ends with exit code 7", [] { _exit(7); });
}
TEST_F(FuzzerFinds, WhatNeverEnds) {
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

// Looks at all that a file holds.
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
    use(SafetensorsFile(path), files.contains("a.safetensors") ? files.at("a.safetensors").size() : 0);
  });
}

// --- Models ---

std::vector<Files> configurations() {
  std::vector<Files> seeds;
  for (const Family& family : families()) seeds.push_back({{"config.json", config_to_json(family.config).dump()}});
  for (const std::string& name : golden_cases()) {  // as transformers writes them
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
    layout.prefix = prefix;
    for (const auto& e : table(c, model.weights)) layout.dtypes[e.parameter.name] = dtype;
    fs::create_directories(dir / "model");
    save_model(dev, dir / "model", model, layout, shard);
    seeds.push_back(files_in(dir / "model"));
    fs::remove_all(dir / "model");
  };
  //                    vocabulary hidden layers heads kv dim mlp length tied
  add(make_config("gpt2", 5, 4, 1, 2, 2, 2, 3, 7, true), "transformer.", "F32", kLargestShard);
  add(make_config("gpt2", 5, 4, 1, 1, 1, 4, 3, 7, true), "", "F16", 300);
  add(make_config("llama", 5, 4, 1, 2, 1, 2, 3, 0, false), "", "BF16", 100);
  add(make_config("qwen2", 5, 4, 2, 2, 1, 2, 3, 0, true), "", "F32", 600);
  add(make_config("gemma3", 5, 4, 2, 2, 1, 2, 3, 0, true), "", "F32", kLargestShard);
  fuzz(seeds, [&](const Files& files) {
    const fs::path path = (*folder)(files);
    ModelLayout layout(path);
    layout.store_as("BF16");
    const Config c = read_config(path);
    Model<float> model{c, Tensors<float>(c)};
    const auto parameters = table(c, model.weights);
    const ModelFiles tensors(path);
    tensors.check_all_used(parameters, c);
    for (const auto& e : parameters) {  // the arena for a model is as large as its configuration says
      require(tensors.at(e.parameter.name).shape == stored_shape(e.parameter), "another shape");
    }
    Cpu dev(static_cast<std::size_t>(4 * parameter_count(c)) + Arena::kAlignment * parameters.size());
    allocate(dev, parameters, Kind::weights);
    load_model(dev, path, model);
  });
}

// --- Tokenizers ---

// Encodes and decodes in every way, and holds the tokenizer to its word.
void use(const Tokenizer& tokenizer, const std::string& text) {
  for (const bool plain : {false, true}) {
    const auto tokens = plain ? tokenizer.encode_plain(text, TextStart::continuation) : tokenizer.encode(text);
    for (const std::int32_t token : tokens) ensure(token >= 0 && token < tokenizer.size(), "tokens have an id");
    for (const Skip skip : {Skip::none, Skip::special}) {
      const std::string whole = tokenizer.decode(tokens, skip);
      ensure(is_utf8(whole), "tokens are text");
      StreamingDecoder decoder(tokenizer, skip);
      std::string streamed;
      for (const std::int32_t token : tokens) streamed += decoder.add(token);
      ensure(streamed + decoder.finish() == whole, "a stream of tokens is the text of all of them");
    }
  }
}

// Texts that bring out what tokenizers do.
std::vector<std::string> golden_texts() {
  std::vector<std::string> texts;
  const Json golden = Json::parse(read_file(golden_folder() / "tokenizers/texts.json"));
  for (const Json& hex : golden.at("texts")) {
    const auto digits = hex.get<std::string>();
    std::string text;
    for (std::size_t i = 0; i < std::min<std::size_t>(digits.size(), 600); i += 2) {
      text += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
    }
    texts.push_back(text);
  }
  return texts;
}

std::vector<fs::path> golden_tokenizers() {
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(golden_folder() / "tokenizers")) {
    if (entry.path().string().ends_with(".tokenizer.json")) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

// With few merges, the tokens these need, and the added ones: so small that damage is likely to matter.
Json shortened(Json tokenizer) {
  Json& model = tokenizer["model"];
  const Json all = model["vocab"], merges = model["merges"];
  Json few = Json::array(), vocabulary = Json::object();
  const auto keep = [&](const std::string& text) {
    if (!all.contains(text) || vocabulary.contains(text)) return;
    const std::size_t id = vocabulary.size();
    vocabulary[text] = id;
  };
  for (const char* byte : {"<0x00>", "<0x41>", "<0xC3>", "<0xA9>", "<0xFF>"}) keep(byte);
  for (std::size_t i = 0; i < std::min<std::size_t>(merges.size(), 20); ++i) {
    const Json& merge = merges[i];
    const auto text = merge.is_string() ? merge.get<std::string>() : "";
    const std::string left = merge.is_string() ? text.substr(0, text.find(' ')) : merge[0].get<std::string>();
    const std::string right = merge.is_string() ? text.substr(text.find(' ') + 1) : merge[1].get<std::string>();
    keep(left), keep(right), keep(left + right);
    few.push_back(merge);
  }
  for (const Json& token : tokenizer["added_tokens"]) keep(token["content"]);
  std::size_t next = vocabulary.size();
  for (Json& token : tokenizer["added_tokens"]) {
    token["id"] = vocabulary.contains(token["content"]) ? vocabulary[std::string(token["content"])] : Json(next++);
  }
  model["vocab"] = vocabulary, model["merges"] = few;
  const std::function<void(Json&)> renumber = [&](Json& json) {  // the ids in templates
    if (json.is_object() && json.contains("ids")) json["ids"] = {0};
    if (!json.is_structured()) return;
    for (Json& part : json) renumber(part);
  };
  renumber(tokenizer["post_processor"]);
  return tokenizer;
}

TEST_F(Fuzz, Tokenizer) {
  std::vector<Files> seeds;
  const auto texts = golden_texts();
  for (const fs::path& path : golden_tokenizers()) {
    seeds.push_back({{"tokenizer.json", shortened(Json::parse(read_file(path))).dump()},
                     {"text", texts[seeds.size() * 7 % texts.size()]}});
  }
  fuzz(seeds, [&](const Files& files) {
    const Tokenizer tokenizer((*folder)(files) / "tokenizer.json");
    if (files.contains("text")) use(tokenizer, files.at("text"));
    for (const std::int32_t token : tokenizer.prefix()) ensure(token < tokenizer.size(), "tokens before a text exist");
  });
}

TEST_F(Fuzz, TextsAndTokens) {
  std::vector<Tokenizer> tokenizers;
  for (const fs::path& path : golden_tokenizers()) tokenizers.emplace_back(path);
  std::vector<Files> seeds;
  for (const std::string& text : golden_texts()) {
    const Tokenizer& tokenizer = tokenizers[seeds.size() % tokenizers.size()];
    std::string ids;
    for (const std::int32_t token : tokenizer.encode(text)) {
      (ids += static_cast<char>(token & 255)) += static_cast<char>(token >> 8);
    }
    seeds.push_back({{"text", text}, {"ids", ids}});
  }
  fuzz(seeds, [&](const Files& files) {
    require(files.size() == 2, "a file is missing");
    const std::string &text = files.at("text"), &bytes = files.at("ids");
    const Tokenizer& tokenizer = tokenizers[text_hash(text) % tokenizers.size()];
    use(tokenizer, text);
    std::vector<std::int32_t> ids;
    for (std::size_t i = 0; i + 1 < bytes.size(); i += 2) {
      ids.push_back(static_cast<unsigned char>(bytes[i]) | bytes[i + 1] * 256);
    }
    ensure(is_utf8(tokenizer.decode(ids)), "tokens are text");
    std::string repaired;
    append_repaired(repaired, text);
    for (const NormalForm form : {NormalForm::nfc, NormalForm::nfd, NormalForm::nfkc, NormalForm::nfkd}) {
      const std::string normal = normalized(form, repaired);
      ensure(normalized(form, normal) == normal, "a normal form is stable");
      ensure(!surely_normal(form, repaired) || normal == repaired, "a normal text stays");
      ensure(static_cast<double>(normal.size()) <= longest_expansion(form) * static_cast<double>(repaired.size()),
             "growth is bounded");
    }
    ensure(is_utf8(lowercase(repaired)) && is_utf8(without_marks(repaired)), "results are text");
  });
}

TEST_F(Fuzz, Expressions) {
  std::vector<Files> seeds;
  const auto texts = golden_texts();
  const auto add = [&](const std::string& expression) {
    seeds.push_back({{"expression", expression}, {"text", texts[seeds.size() * 11 % texts.size()]}});
  };
  const std::function<void(const Json&)> search = [&](const Json& json) {
    if (json.is_object() && json.contains("Regex")) add(json["Regex"]);
    if (!json.is_structured()) return;
    for (const Json& part : json) search(part);
  };
  for (const fs::path& path : golden_tokenizers()) search(Json::parse(read_file(path)));
  for (const char* other :
       {"(?:a|aa)+b|a", "[^\\s\\d]{2,}(?=x)|(?<!a)\\S+", "(?>a*)b|(?i:x)+?", "\\x{9}|\\p{Han}|\\P{L}"}) {
    add(other);
  }
  fuzz(seeds, [&](const Files& files) {
    require(files.size() == 2, "a file is missing");
    std::string text;
    append_repaired(text, files.at("text"));
    const Pattern pattern = Pattern::expression("expression", files.at("expression"));
    std::size_t done = 0;
    pattern.for_each(text, [&](std::size_t begin, std::size_t end, Span) {
      ensure(begin == done && end > begin && is_utf8(std::string_view(text).substr(begin, end - begin)),
             "parts are text and follow each other");
      done = end;
    });
    ensure(done == text.size(), "parts are all of the text");
  });
}

// --- Data ---

const char* const kLines[] = {
    R"({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi <s>!\n"},)"
    R"( {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."}], "id": 7})",
    R"({"messages": [{"role": "user", "content": "é\u0000"}, {"role": "assistant", "content": "a", "tool_calls": []},)"
    R"( {"role": "user", "content": "<tool_response>x</tool_response>"}, {"role": "assistant", "content": "b"}]})",
    R"({"prompt": [{"role": "user", "content": "1+1?"}], "completion": [{"role": "assistant", "content": "2"}]})",
    R"({"prompt": "<s>[INST] Say [/INST]", "completion": " it</s>", "tools": null})",
    R"({"text": "Once upon a time \ud83d\ude00"})",
    R"({"prompt": "Say", "chosen": " it", "rejected": " nothing</s>"})",
    R"({"prompt": [{"role": "user", "content": "1+1?"}], "chosen": [{"role": "assistant", "content": "2"}],)"
    R"( "rejected": [{"role": "assistant", "content": "<think>\nhm\n</think>\n\n3"}]})",
    R"({"prompt": "Say", "completions": [" it", " nothing</s>"], "rewards": [1, 0.5]})",
    R"({"prompt": "Say", "completions": [[5, 6, 2], [7]], "advantages": [-1e3, 2], "old_logps": [[-1, -0.5, 0], [-9]]})",
    R"({"prompt": [{"role": "user", "content": "1+1?"}], "completions": [[{"role": "assistant", "content": "2"}],)"
    R"( [5, 6]], "rewards": [1, 0]})",
    R"({"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user",)"
    R"( "content": "c"}, {"role": "assistant", "content": "d"}], "rejected": [{"role": "user", "content": "a"},)"
    R"( {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "e"}]})"};

TEST_F(Fuzz, Examples) {
  make_tokenizer_directory(dir / "model", "metaspace");
  const Tokenizer tokenizer(dir / "model");
  std::vector<Encoder> encoders;
  for (const Layout& layout : chat_layouts()) {
    encoders.emplace_back(tokenizer, dir / "model", Chat::of(dir / "model", layout.name), "", encoders.size() % 4 == 0);
  }
  std::vector<Files> seeds;
  for (const char* line : kLines)
    seeds.push_back({{"data.jsonl", line}, {"layout", {static_cast<char>(2 * seeds.size())}}});
  seeds.push_back(
      {{"data.jsonl", std::string("\xef\xbb\xbf") + kLines[0] + "\r\n\n" + kLines[4] + "\n"}, {"layout", "x"}});
  fuzz(seeds, [&](const Files& files) {
    require(files.size() == 2, "a file is missing");
    const Encoder& encoder = encoders[text_hash(files.at("layout")) % encoders.size()];
    Lines lines((*folder)(files) / "data.jsonl", 10'000);
    for (std::string line; lines.next(line);) {
      if (line.empty()) continue;
      const Example example = parse_example(line);
      const std::vector<Document> documents = encoder.encode(example);
      ensure(
          example.kind != Example::preference || (documents.size() == 2 && documents[0].tokens != documents[1].tokens),
          "a preference is between two");
      for (const Document& document : documents) {
        ensure(document.tokens.size() == document.learn.size() && document.learned() > 0, "something is to be learned");
        ensure(document.advantage.has_value() == (example.kind == Example::group), "groups have advantages");
        ensure(document.old.empty() || document.old.size() == document.tokens.size(), "all tokens have or none");
        const Index limit = example.kind == Example::group ? INT32_MAX : tokenizer.size();
        for (const std::int32_t token : document.tokens) ensure(token >= 0 && token < limit, "tokens exist");
      }
    }
  });
}

TEST_F(Fuzz, TokenFile) {
  std::vector<Files> seeds;
  for (const std::size_t documents : {1, 3, 4, 6, 5, 8}) {
    const bool groups = documents == 5 || documents == 8;
    seeds.push_back({{"tokens.safetensors", written([&](const fs::path& path) {
                        TokenWriter writer(path);
                        for (std::size_t i = 0; i < documents; ++i) {
                          Document document;
                          document.add(std::vector<std::int32_t>(3 * i + 2, static_cast<std::int32_t>(i)), true);
                          if (groups) document.advantage = {static_cast<double>(i), -1};
                          if (documents == 8) document.old.assign(document.tokens.size(), -2);
                          writer.add(document);
                        }
                        const char* kind = groups ? "groups" : documents % 2 ? "documents" : "preferences";
                        writer.finish({{"format", "streambp tokens"}, {"kind", kind}, {"key", "{}"}});
                      })}});
  }
  fuzz(seeds, [&](const Files& files) {
    const TokenFile file((*folder)(files) / "tokens.safetensors");
    Index tokens = 0;
    for (const Index length : file.lengths()) ensure(length > 0, "documents hold tokens"), tokens += length;
    ensure(tokens == file.token_count() && file.longest() <= tokens, "documents are all of the tokens");
    file.fingerprint(), file.learned_count();
    file.require_vocabulary(100);
    Documents documents(file, {.evaluation_fraction = 0.3,
                               .length = 8,
                               .longest = 5,
                               .packs = 2,
                               .micro_batches = 2,
                               .seed = 1,
                               .too_long = file.kind() == DataKind::documents ? TooLong::split : TooLong::truncate});
    for (Index step = 1; step < 4; ++step) {
      const Batch batch = documents.batch(step, 1);
      const Index begun = std::count(batch.positions.begin(), batch.positions.end(), 0);
      ensure(begun % file.together() == 0, "pairs stay together");
      require_shape(batch);
      ensure(batch.advantages.empty() != file.groups(), "groups have advantages");
    }
  });
}

TEST_F(Fuzz, BinFile) {
  std::vector<Files> seeds;
  for (const std::size_t width : {2, 4}) {
    std::array<std::int32_t, 256> header{};
    header[0] = width == 2 ? 20240520 : 20240801, header[1] = width == 2 ? 1 : 7, header[2] = 9;
    std::string bytes(reinterpret_cast<const char*>(header.data()), sizeof header);
    for (const std::int32_t token : {50256, 1, 2, 128000, 3, 4, 50256, 5, 6}) {
      bytes.append(reinterpret_cast<const char*>(&token), width);
    }
    seeds.push_back({{"tokens.bin", bytes}});
  }
  fuzz(seeds, [&](const Files& files) {
    TokenWriter writer(dir / "written");
    add_bin_file((*folder)(files) / "tokens.bin", writer);
    ensure(writer.tokens_count() <= 2000 && writer.documents() <= writer.tokens_count(), "no token is made up");
  });
}

TEST_F(Fuzz, ChatAndGeneration) {
  make_tokenizer_directory(dir / "model", "byte_level");
  const Tokenizer tokenizer(dir / "model");
  std::vector<Files> seeds = {
      {{"tokenizer_config.json", R"({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": null})"},
       {"config.json", R"({"model_type": "llama", "eos_token_id": [2, 1]})"},
       {"generation_config.json", R"({"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 20})"}},
      {{"tokenizer_config.json",
        R"({"chat_template": [{"name": "default", "template": "{{ x }}"}], "bos_token": "{bos}"})"},
       {"special_tokens_map.json", R"({"bos_token": "<s>", "eos_token": "</s>"})"}},
      {{"chat_template.jinja", "{% for m in messages %}"}, {"generation_config.json", R"({"eos_token_id": 2})"}},
      {{"chat_template.json", R"({"chat_template": "{{ messages }}"})"},
       {"config.json", R"({"eos_token_id": 1})"},
       {"generation_config.json", R"({"do_sample": false, "eos_token_id": null})"}}};
  fuzz(seeds, [&](const Files& files) {
    const fs::path path = (*folder)(files);
    read_template(path);
    bool known = true;
    try {
      const auto layouts = chat_layouts();
      const Chat chat = Chat::of(path, layouts[text_hash(files.begin()->second) % layouts.size()].name);
      const Message messages[] = {{"user", "a{eos}"}, {"assistant", "b"}};
      ensure(!chat.render(messages).empty() && !chat.lessons(messages).empty(), "a conversation is some text");
      Chat::of(path);  // whose template is none of those that are known
    } catch (const Error&) {
      known = false;
    }
    ensure(!known, "a template is known");
    const std::int32_t end = read_end_token(path, tokenizer);
    ensure(end >= 0 && end < tokenizer.size(), "the end is a token");
    for (const std::int32_t stop : read_generation_defaults(path).stop) ensure(stop >= 0, "ids are not negative");
  });
}

}  // namespace
}  // namespace streambp
