// Fuzz tests of training data: JSON lines, token files, chat templates and generation settings.
#include "data/documents/sources.h"
#include "data/documents/tokenised.h"
#include "data/files/generation_config.h"
#include "tests/chat_models.h"
#include "tests/fuzz_fixture.h"

namespace streambp {
namespace {

const char* const kLines[] = {
    R"({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi <s>!\n"},)"
    R"( {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."}], "id": 7})",
    R"({"messages": [{"role": "user", "content": "é\u0000"}, {"role": "assistant", "content": "a", "tool_calls": []},)"
    R"( {"role": "user", "content": "<tool_response>x</tool_response>"}, {"role": "assistant", "content": "b"}]})",
    R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "Warm?"}]}, {"role": "assistant", "content":)"
    R"( null, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{\"a\": [1, 2.5]}"}}]}, {"role": "tool",)"
    R"( "content": "21"}, {"role": "assistant", "content": "21", "reasoning": "so", "weight": 1}], "tools": [{"x": 1}]})",
    R"({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "train": false},)"
    R"( {"from": "gpt", "value": "c"}], "chat_template_kwargs": {"enable_thinking": false}})",
    R"({"instruction": "a", "input": "b", "output": "c"})",
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
  const Tokenizer tokenizer = read_tokenizer(dir / "model");
  std::vector<Encoder> encoders;
  for (const char* name : {"turns", "marked", "brackets"})
    encoders.emplace_back(tokenizer, dir / "model", Chat::of(dir / "model", {chat_template(name)}), "", Learn::answers);
  const Encoder all(tokenizer, dir / "model", Chat::of(dir / "model", {chat_template("turns")}), "", Learn::all);
  std::vector<Files> seeds;
  for (const char* line : kLines)
    seeds.push_back({{"data.jsonl", line}, {"template", {static_cast<char>(2 * seeds.size())}}});
  seeds.push_back(
      {{"data.jsonl", std::string("\xef\xbb\xbf") + kLines[0] + "\r\n\n" + kLines[4] + "\n"}, {"template", "x"}});
  seeds.push_back({{"data.jsonl", "[" + std::string(kLines[0]) + ",\n" + kLines[4] + "]"}, {"template", "x"}});
  fuzz(seeds, [&](const Files& files) {
    require(files.size() == 2, "a file is missing");
    const Encoder& encoder = encoders[text_hash(files.at("template")) % encoders.size()];
    JsonValues lines((*folder)(files) / "data.jsonl", 10'000);
    for (std::string line; lines.next(line);) {
      const Example example = parse_example(line);
      const std::vector<Document> documents = encoder.encode(example);
      if (example.kind == Example::conversation) all.encode(example);
      ensure(
          example.kind != Example::preference || (documents.size() == 2 && documents[0].tokens != documents[1].tokens),
          "a preference has two different sides");
      for (const Document& document : documents) {
        ensure(document.tokens.size() == document.learn.size() && document.learned() > 0, "there is a token to learn");
        ensure(document.advantage.has_value() == (example.kind == Example::group), "groups have advantages");
        ensure(document.old.empty() || document.old.size() == document.tokens.size(),
               "old log-probs are for all tokens or none");
        const Index limit = example.kind == Example::group ? INT32_MAX : tokenizer.size();
        for (const std::int32_t token : document.tokens) ensure(token >= 0 && token < limit, "tokens exist");
      }
    }
  });
}

TEST_F(Fuzz, CompressedFiles) {
  const std::string text = std::string(kLines[0]) + "\n" + std::string(300, 'x');
  std::string gzip(1000, '\0'), zstd(1000, '\0');
  z_stream z = {};
  deflateInit2(&z, 9, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  z.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data())), z.avail_in = static_cast<uInt>(text.size());
  z.next_out = reinterpret_cast<Bytef*>(gzip.data()), z.avail_out = static_cast<uInt>(gzip.size());
  deflate(&z, Z_FINISH), gzip.resize(z.total_out), deflateEnd(&z);
  zstd.resize(ZSTD_compress(zstd.data(), zstd.size(), text.data(), text.size(), 3));
  fuzz({{{"a.gz", gzip}}, {{"a.gz", gzip + gzip}}, {{"a.zst", zstd}}, {{"a.zst", zstd + zstd}}},
       [&](const Files& files) {
         require(!files.empty(), "a file is missing");
         const std::string read = read_text((*folder)(files) / files.begin()->first, 100'000);
         ensure(read.size() <= 100'000, "the limit holds");
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
                          document.add(std::vector<std::int32_t>(3 * i + 2, static_cast<std::int32_t>(i)), InLoss::yes);
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
    ensure(tokens == file.token_count() && file.longest() <= tokens, "documents cover the tokens");
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
    ensure(writer.tokens_count() <= 2000 && writer.documents() <= writer.tokens_count(),
           "there are no more tokens than in the file");
  });
}

// Damaged templates end in a text or an error.
TEST_F(Fuzz, TemplatePrograms) {
  const auto golden = parse_json<OrderedJson>(read_file(golden_folder() / "language.json"));
  jinja::Variables variables;
  for (const auto& [name, value] : golden["variables"].items()) variables.emplace_back(name, jinja::from_json(value));
  std::vector<Files> seeds;
  std::string some;
  for (const auto& [source, result] : golden["results"].items()) {
    if (!result.is_null()) some += source + "\n";
    if (some.size() > 300 || source.find('%') != source.npos) seeds.push_back({{"template", std::exchange(some, "")}});
  }
  fuzz(seeds, [&](const Files& files) {
    const jinja::Text text = jinja::Template(files.at("template"), "2026-11-25").render(variables, 1'000'000);
    ensure(is_utf8(jinja::to_utf8(text)), "the text is UTF-8");
  });
}

TEST_F(Fuzz, ChatAndGeneration) {
  make_tokenizer_directory(dir / "model", "byte_level");
  const Tokenizer tokenizer = read_tokenizer(dir / "model");
  std::vector<Files> seeds = {
      {{"tokenizer_config.json", R"({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": null})"},
       {"config.json", R"({"model_type": "llama", "eos_token_id": [2, 1]})"},
       {"generation_config.json", R"({"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 20})"}},
      {{"tokenizer_config.json",
        R"({"chat_template": [{"name": "default", "template": "{{ messages[1].content }}"}], "bos_token": "{bos}"})"},
       {"special_tokens_map.json", R"({"bos_token": "<s>", "eos_token": "</s>"})"}},
      {{"chat_template.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}"},
       {"generation_config.json", R"({"eos_token_id": 2})"}},
      {{"chat_template.json", R"({"chat_template": "{{ messages }}"})"},
       {"config.json", R"({"eos_token_id": 1})"},
       {"generation_config.json", R"({"do_sample": false, "eos_token_id": null})"}}};
  fuzz(seeds, [&](const Files& files) {
    const fs::path path = (*folder)(files);
    const bool there = !read_template(path).text.empty();
    const Chat chat = there ? Chat::of(path) : Chat::of(path, {"chatml"});
    chat.render({.messages = {{"user", "a{eos}"}, {"assistant", "b"}}});
    const std::int32_t end = read_end_token(path, tokenizer);
    ensure(end >= 0 && end < tokenizer.size(), "the end is a token");
    for (const std::int32_t stop : read_generation_defaults(path).stop) ensure(stop >= 0, "ids are not negative");
  });
}

}  // namespace
}  // namespace streambp
