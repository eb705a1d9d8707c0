// Data as users have it: compressed files, lists of JSON, folders, forms, and parts that are mixed by weight.
#include <zlib.h>
#include <zstd.h>

#include "data/documents/data_checks.h"
#include "tests/data_files.h"
#include "tests/encoding.h"

namespace streambp {
namespace {

// --- Compressed files ---

std::string gzipped(const std::string& text) {
  std::string out(compressBound(static_cast<uLong>(text.size())) + 64, '\0');
  z_stream z = {};
  EXPECT_EQ(deflateInit2(&z, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY), Z_OK);
  z.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  z.avail_in = static_cast<uInt>(text.size());
  z.next_out = reinterpret_cast<Bytef*>(out.data()), z.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&z, Z_FINISH), Z_STREAM_END);
  out.resize(z.total_out);
  deflateEnd(&z);
  return out;
}
std::string zstandard(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

class CompressedFiles : public DataFiles {
 protected:
  Strings lines_of(const fs::path& path) {
    Lines lines(path);
    Strings all;
    for (std::string line; lines.next(line);) all.push_back(line);
    return all;
  }
  // Lines that fill several blocks of the readers.
  std::string text() const {
    std::string text;
    for (std::uint64_t i = 0; text.size() < 3'000'000; ++i)
      text += std::string(mix(i) % 300, static_cast<char>('a' + i % 26)) + std::to_string(mix(i)) + "\n";
    return text;
  }
};

TEST_F(CompressedFiles, AreReadAsTheTextTheyHold) {
  const std::string all = text(), half = all.substr(0, all.find('\n', all.size() / 2) + 1),
                    rest = all.substr(half.size());
  const Strings expected = lines_of(write("plain", all));
  EXPECT_EQ(lines_of(write("a.gz", gzipped(all))), expected);
  EXPECT_EQ(lines_of(write("a.jsonl.ZST", zstandard(all))), expected);
  // Several streams in a file, as parallel compressors write them
  EXPECT_EQ(lines_of(write("b.gz", gzipped(half) + gzipped("") + gzipped(rest))), expected);
  EXPECT_EQ(lines_of(write("b.zst", zstandard(half) + zstandard("") + zstandard(rest))), expected);
  EXPECT_EQ(lines_of(write("c.gz", gzipped(""))), Strings{});
  EXPECT_EQ(lines_of(write("c.zst", "")), Strings{});
  EXPECT_EQ(read_text(write("d.txt.gz", gzipped("\xef\xbb\xbf" + all)), 1 << 22), all);
  EXPECT_ERROR(read_text(dir / "d.txt.gz", 1000), "d.txt.gz: has more than 1000 bytes");
  EXPECT_ERROR(read_text(write("e.txt.gz", gzipped(std::string(10 << 20, 'a'))), 2 << 20), "more than 2097152 bytes");
}

TEST_F(CompressedFiles, ThatAreDamagedAreRefused) {
  const std::string all = text().substr(0, 50'000);
  for (const auto& [name, bytes] : {std::pair("a.gz", gzipped(all)), std::pair("a.zst", zstandard(all))}) {
    for (const std::size_t size : {std::size_t{1}, std::size_t{5}, bytes.size() / 2, bytes.size() - 1})
      EXPECT_ERROR(lines_of(write(name, bytes.substr(0, size))),
                   "in the middle of its compressed data; is the file complete?");
    EXPECT_ERROR(lines_of(write(name, bytes + "more text")), "is not valid");
    EXPECT_ERROR(lines_of(write(name, "plain text")), "is not valid");
    for (std::size_t at = 0; at < bytes.size(); at += 97) {
      std::string damaged = bytes;
      damaged[at] ^= 0x10;
      try {
        lines_of(write(name, damaged));  // without a checksum, the text can be another one
      } catch (const Error& error) {
        EXPECT_TRUE(contains(error.what(), name)) << error.what();
      }
    }
  }
}

// --- Values of JSON ---

class JsonFiles : public DataFiles {
 protected:
  // Each value after its place
  Strings values_of(const std::string& text, std::size_t longest = kLongestText) {
    JsonValues values(write("a.json", text), longest);
    Strings all;
    for (std::string value; values.next(value);) {
      const std::string where = values.where();
      all.push_back(where.substr(where.find("a.json") + 6) + value);
    }
    EXPECT_FALSE(values.next(text_)) << text;  // again
    return all;
  }
  std::string text_;
};

TEST_F(JsonFiles, AreLinesOrAList) {
  EXPECT_EQ(values_of("{}\n\n {\"a\": 1}\n"), (Strings{":1: {}", ":3:  {\"a\": 1}"}));
  EXPECT_EQ(values_of(""), Strings{});
  EXPECT_EQ(values_of(" \n[ ]\n"), Strings{});
  EXPECT_EQ(values_of("\xef\xbb\xbf[{}]"), Strings{", example 1: {}"});
  EXPECT_EQ(values_of(R"([{"a": "],[\"\\"}, {"b": [1, {"c": "}"}]}])"),
            (Strings{R"(, example 1: {"a": "],[\"\\"})", R"(, example 2:  {"b": [1, {"c": "}"}]})"}));
  EXPECT_EQ(values_of("[1,,]"),
            (Strings{", example 1: 1", ", example 2: ", ", example 3: "}));  // errors for the parser
  const std::string wide = "\"" + std::string(1'200'000, 'x') + "\"";
  EXPECT_EQ(values_of("[" + wide + "," + wide + "]"), (Strings{", example 1: " + wide, ", example 2: " + wide}));
}

TEST_F(JsonFiles, ThatAreIncompleteAreRefused) {
  for (const char* text : {"[", "[{}", "[{},", "[{}, {\"a\": \"]\"", "[\"a]"})
    EXPECT_ERROR(values_of(text), "the list does not end; is the file complete?");
  EXPECT_ERROR(values_of("[{}]\n{}"), "a.json: example 1 is followed by text after the list");
  EXPECT_ERROR(values_of("[1, 23456]", 5), "a.json, example 2: has more than 5 bytes");
}

// --- Parts ---

class DataParts : public DataFiles {};

TEST_F(DataParts, AreFilesFoldersAndWeights) {
  for (const char* name : {"folder/b.jsonl", "folder/a.txt", "folder/deep/c.json.gz", "folder/README.md",
                           "folder/.git/d.jsonl", "folder/.e.jsonl", "empty/README.md", "x:1", "y"}) {
    fs::create_directories((dir / name).parent_path());
    write(name, "text");
  }
  const std::string base = dir.string() + "/";
  const auto parts = data_parts({base + "folder:0.5", base + "x:1:2e-1", base + "y:3"});
  ASSERT_EQ(parts.size(), 3u);
  EXPECT_EQ(parts[0].name, base + "folder");
  EXPECT_EQ(parts[0].files,
            (std::vector<fs::path>{base + "folder/a.txt", base + "folder/b.jsonl", base + "folder/deep/c.json.gz"}));
  EXPECT_EQ(parts[0].weight, 0.5);
  EXPECT_EQ(parts[1].files, std::vector<fs::path>{base + "x:1"});  // a colon in a name
  EXPECT_EQ(parts[1].weight, 0.2);
  EXPECT_EQ(data_files({base + "folder", base + "x:1"}).size(), 4u);
  EXPECT_ERROR(data_files({base + "y:1", base + "x:1:1"}), "weights are for training on documents");
  EXPECT_ERROR(data_parts({base + "y:1", base + "x:1"}), "x:1: has no weight, unlike other data");
  EXPECT_ERROR(data_parts({base + "x:1", base + "y:1"}), "x:1: has no weight, unlike other data");
  EXPECT_ERROR(data_parts({base + "y:1"}), "the only data needs no weight");
  for (const char* weight : {"0", "-1", "nan", "inf", "1e9", "x", "", "1 "})
    EXPECT_ERROR(data_parts({base + "y:" + weight, base + "x:1"}), "is not a number from 0.000001 to 1000000");
  EXPECT_ERROR(data_parts({base + "missing:0.5"}), "no such file");
  EXPECT_ERROR(data_parts({base + "empty"}), "no data in this folder");
  EXPECT_ERROR(data_parts({write("t.parquet", "PAR1")}),
               "t.parquet: Parquet is not read; convert it: python3 -c 'import datasets");
  EXPECT_ERROR(data_parts({write("t.csv", "prompt,completion\n")}), ": CSV is not read; convert it: python3 -c");
  EXPECT_ERROR(data_parts({write("t.tsv.gz", "")}), "t.tsv.gz: TSV is not read; convert it: python3 -c");
}

// Nothing that could be data is left out in silence.
TEST_F(DataParts, OfFoldersHaveNoLinksThatLeadNowhere) {
  const auto folder = [&](const std::string& name) {
    fs::create_directories(dir / name);
    write(name + "/a.jsonl", "{\"text\": \"a\"}");
    return dir / name;
  };
  const fs::path good = folder("good"), dangling = folder("dangling"), looping = folder("looping"),
                 nested = folder("nested"), pipe = folder("pipe"), table = folder("table");
  fs::create_symlink(good / "a.jsonl", good / "b.jsonl");
  fs::create_symlink(dir / "nowhere", good / ".hidden");
  EXPECT_EQ(files_in(good).size(), 2u);
  fs::create_symlink(dir / "nowhere", dangling / "b.jsonl");
  EXPECT_ERROR(files_in(dangling), "dangling/b.jsonl: is a link to a file that is not there; remove it");
  fs::create_symlink("b.jsonl", looping / "b.jsonl");
  EXPECT_ERROR(files_in(looping), "looping/b.jsonl: is a link to a file that is not there");
  fs::create_directory_symlink(good, nested / "more");
  EXPECT_ERROR(files_in(nested), "nested/more: is a link to a folder, which is not followed; name that folder too");
  ASSERT_EQ(mkfifo((pipe / "b.jsonl").c_str(), 0600), 0);
  EXPECT_ERROR(data_parts({pipe.string()}), "b.jsonl: is not a regular file");
  write("table/b.csv", "");
  EXPECT_ERROR(data_parts({table.string()}), "b.csv: CSV is not read");
}

// --- Mixtures ---

TEST(Mixtures, HaveTheSharesOfTheirWeights) {
  const std::vector<std::pair<Index, double>> parts = {{400, 0.5}, {90, 0.3}, {2000, 0.2}};  // documents, weight
  const auto made = [&] {
    std::vector<Mixture::Part> all;
    Index document = 0;
    for (const auto& [count, weight] : parts) {
      std::vector<PackedPiece> pieces;
      for (Index i = 0; i < count; ++i, ++document)
        pieces.push_back({document, 0, 20 + static_cast<Index>(mix(static_cast<std::uint64_t>(document)) % 200)});
      all.push_back({Packing(pieces, 512, 7 + all.size()), weight});
    }
    return Mixture(std::move(all), 7);
  };
  const auto part_of = [](Index document) { return document < 400 ? 0 : document < 490 ? 1 : 2; };
  Mixture mixture = made();
  const Index epochs = 12, epoch = static_cast<Index>(mixture.packs());
  std::vector<double> tokens(3);
  std::map<Index, Index> used;
  std::vector<Index> first;  // documents of pack 0 of each epoch
  for (Index n = 0; n < epochs * epoch; ++n) {
    const auto pack = mixture.pack(n);
    for (const PackedPiece& piece : pack) {
      EXPECT_EQ(part_of(piece.document), part_of(pack[0].document));
      tokens[static_cast<std::size_t>(part_of(piece.document))] += static_cast<double>(piece.length);
      ++used[piece.document];
    }
    if (n % epoch == 0) first.push_back(pack[0].document);
  }
  const double all = tokens[0] + tokens[1] + tokens[2];
  for (std::size_t p = 0; p < 3; ++p) {
    EXPECT_NEAR(tokens[p] / all, parts[p].second, 0.02);
    EXPECT_NEAR(mixture.share(p), parts[p].second, 0.02);
  }
  EXPECT_NE(first[0], first[1]);
  // Each document of a part is used as often as the others, but for one time.
  std::vector<std::pair<Index, Index>> range(3, {1 << 30, 0});
  EXPECT_EQ(used.size(), 2490u);
  for (const auto& [document, times] : used) {
    auto& [least, most] = range[static_cast<std::size_t>(part_of(document))];
    least = std::min(least, times), most = std::max(most, times);
  }
  for (std::size_t p = 0; p < 3; ++p) {
    EXPECT_LE(range[p].second - range[p].first, 1);
    EXPECT_NEAR(static_cast<double>(range[p].first), mixture.passes(p) * static_cast<double>(epochs), 2);
  }
  // Any pack can be the first: a resumed run needs no state.
  for (const Index n : {5 * epoch + 3, epoch - 1, Index{0}}) {
    Mixture resumed = made();
    const auto a = mixture.pack(n), b = resumed.pack(n);
    EXPECT_TRUE(std::ranges::equal(a, b, {}, &PackedPiece::document, &PackedPiece::document));
  }
}

// --- Forms and parts of token files ---

const std::string
    kText = R"({"text": "One."})",
    kAnswer = R"({"prompt": "a", "completion": "b"})",
    kAnswerOfMessages =
        R"({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]})";

TEST_F(Encoding, RefusesTwoFormsInAFile) {
  model("byte_level");
  const fs::path mixed = write("a.jsonl", kText + "\n\n" + kText + "\n" + kAnswer + "\n");
  EXPECT_PRED2(contains, refusal({mixed}), "a.jsonl:4: has prompt, completion, but ");
  EXPECT_PRED2(contains, refusal({mixed}, {.skip_bad = true}), "a.jsonl:1 has text; give each form its own file");
  write("b.json", "[" + kAnswer + "," + kAnswerOfMessages + "]");
  EXPECT_PRED2(contains, refusal({dir / "b.json"}, {.chat = {"chatml"}}),
               "b.json, example 2: has prompt, completion as messages, but ");
}

TEST_F(Encoding, NamesThePartsAndTheirForms) {
  model("byte_level");
  fs::create_directories(dir / "folder");
  write("folder/a.jsonl", kText + "\n" + kText), write("folder/b.jsonl.gz", gzipped(kAnswer)), write("c.txt", "A book");
  const TokenFile file = tokenise({dir / "folder", dir / "c.txt"});
  ASSERT_EQ(file.parts.size(), 2u);
  EXPECT_EQ(file.parts[0].form, "prompt, completion; text");
  EXPECT_EQ(file.parts[0].documents, 3);
  EXPECT_EQ(file.parts[1].form, "plain text");
  EXPECT_FALSE(file.mixes());
  // Weights change the mixture, but not the tokens.
  const TokenFile mixed = tokenise({dir.string() + "/folder:1", dir.string() + "/c.txt:3"});
  EXPECT_EQ(mixed.path(), file.path());
  EXPECT_TRUE(mixed.mixes());
  EXPECT_EQ(mixed.parts[1].weight, 3);
  EXPECT_NE(mixed.fingerprint(), file.fingerprint());
  write("empty.jsonl", "\n");
  EXPECT_PRED2(contains, refusal({dir / "c.txt", dir / "empty.jsonl"}), "empty.jsonl: no documents found; it is empty");
}

TEST_F(DataFiles, PartsThatDoNotFitTheFileAreRefused) {
  const std::vector<Document> documents = {{{1, 2}, {0, 1}}, {{3, 4}, {0, 1}}};
  const auto part = [](Index count, double weight) {
    return Json{{"name", "a"}, {"form", "text"}, {"documents", count}, {"weight", weight}};
  };
  const auto read = [&](const Json& parts) { return token_file(documents, {{"parts", parts.dump()}}); };
  EXPECT_EQ(read({part(1, 0.5), part(1, 2)}).parts.size(), 2u);
  for (const Json& bad :
       {Json(Json::array()), Json("x"), Json({part(1, 0)}), Json({part(3, 0)}), Json({part(0, 0), part(2, 0)}),
        Json({part(1, 0), part(1, 1)}), Json({part(2, -1)}), Json({3})})
    EXPECT_PRED2(contains, error_of([&] { read(bad); }), "\"parts\"") << bad;
}

TEST_F(Encoding, ShowsTheFirstSkippedExamples) {
  model("byte_level");
  std::string lines;
  for (int i = 0; i < 6; ++i) lines += "{\"text\": " + std::to_string(i) + "}\n" + kText + "\n";
  const TokenFile file = tokenise({write("a.jsonl", lines)}, {.skip_bad = true});
  EXPECT_PRED2(contains, file.skipped(), "examples skipped: 6, the first: ");
  for (const char* place : {"a.jsonl:1: ", "a.jsonl:3: ", "a.jsonl:5: "}) EXPECT_PRED2(contains, file.skipped(), place);
  EXPECT_FALSE(contains(file.skipped(), "a.jsonl:7: "));
}

// --- Checks of what can be learned ---

class Checks : public Encoding {
 protected:
  std::string warnings(const std::string& lines, const DataOptions& options = {}) {
    const TokenFile file = tokenise({write("data.jsonl", lines)}, options);
    std::string all;
    for (const std::string& text : DataChecks(file, dir / "model", options).warnings()) all += text + "\n";
    return all;
  }
};

TEST_F(Checks, FindWhatCannotBeLearned) {
  model("byte_level");
  const std::string chat =
      R"({"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes. No."}]})";
  EXPECT_EQ(warnings(kText + "\n" + kText), "");
  const std::string marker = "<|no_such_token|>";
  const auto with_template = [&](const std::string& text) {
    return DataOptions{.chat = {write("t.jinja", text).string()}};
  };
  const std::string loop = "{% for m in messages %}", end = "{% endfor %}";
  const DataOptions unknown = with_template(loop + marker + "{{ m.role }}: {{ m.content }}<|im_end|>" + end +
                                            "{% if add_generation_prompt %}" + marker + "assistant: {% endif %}");
  EXPECT_PRED2(contains, warnings(chat, unknown), "writes \"<|no_such_token|>\", which is no token of this model");
  const DataOptions endless =
      with_template(loop + "{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}<|im_end|>" + end);
  EXPECT_PRED2(contains, warnings(chat, endless), "no document has an end token in the loss");
  const DataOptions everything =
      with_template("{% generation %}" + loop + "{{ m.content }}<|im_end|>" + end + "{% endgeneration %}");
  EXPECT_PRED2(contains, warnings(chat, everything), "every token of the conversations is in the loss");
  const TokenFile file = tokenise({write("c.jsonl", chat)}, {.chat = {"chatml"}});
  EXPECT_EQ(DataChecks(file, dir / "model", {.chat = {"chatml"}}).first_learned(), "Yes.");
  // A hundred tokens of bytes end within a character.
  std::string wide = "a";
  for (int i = 0; i < 60; ++i) wide += "世";
  const TokenFile cut = tokenise({write("w.jsonl", "{\"text\": \"" + wide + "\"}")});
  const std::string shown = DataChecks(cut, dir / "model", {}).first_learned();
  EXPECT_GT(shown.size(), 80u);
  EXPECT_EQ(wide.find(shown), 1u) << shown;  // the first token predicts nothing
}

// The template drops the reasoning of the first answer once the second follows.
TEST_F(Checks, SayWhyThereAreMoreDocumentsThanExamples) {
  model("byte_level");
  const std::string turn =
      R"({"role": "user", "content": "Hi."}, {"role": "assistant", "content": "<think>a</think>b"})";
  const std::string one = "{\"messages\": [" + turn + "]}\n", two = "{\"messages\": [" + turn + ", " + turn + "]}\n";
  const DataOptions options = {.chat = {chat_template("turns")}};
  EXPECT_PRED2(contains, warnings(one + two + one, options), "4 documents from 3 examples: an answer is a separate");
  EXPECT_FALSE(contains(warnings(one + one, options), "examples"));
}

TEST_F(Checks, SayThatMarksOfReasoningAreTokens) {
  model("byte_level");
  const auto notes = [&](const char* answer) {
    const DataOptions options = {.chat = {"chatml"}};
    const std::string line =
        R"({"messages": [{"role": "user", "content": "<think>Hi.</think>"}, {"role": "assistant", "content": ")";
    const TokenFile file = tokenise({write("r.jsonl", line + answer + "\"}]}")}, options);
    return join(DataChecks(file, dir / "model", options).warnings());
  };
  EXPECT_PRED2(contains, notes("<think>Easy.</think>Yes."),
               "reasoning: <think> and </think> in answers are tokens, not text");
  EXPECT_FALSE(contains(notes("Yes."), "reasoning"));
}

TEST_F(Checks, FindTokensThatTheModelWasNotTrainedOn) {
  model("byte_level");
  const std::string chat =
      R"({"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes."}]})";
  const Index vocab = tokens_->size();
  Config c = make_config("llama", {vocab, 8, 1, 1, 1, 8, 8, 64, true});
  const auto save = [&](const std::vector<const char*>& zero, bool equal) {
    Cpu dev(std::size_t{1} << 24);
    Model<float> model{c, Tensors<float>(c)};
    allocate_weights(dev, model);
    initialise(dev, model, 1);
    float* table = model.weights.embedding.tokens.data;
    for (const char* name : zero)
      for (Index j = 0; j < c.hidden; ++j) table[*tokens_->find(name) * c.hidden + j] = equal ? 0.5f : 0;
    save_model(dev, dir / "model", model, ModelLayout(c));
  };
  const DataOptions options = {.chat = {"chatml"}};
  save({}, false);
  EXPECT_EQ(warnings(chat, options), "");
  save({"<|im_end|>"}, false);
  EXPECT_PRED2(contains, warnings(chat, options),
               "the data have \"<|im_end|>\", but the model was never trained on it");
  EXPECT_EQ(warnings(kText, options), "");
  save({"<|im_start|>", "<|im_end|>"}, true);
  EXPECT_PRED2(contains, warnings(chat, options), "the data have \"<|im_start|>\", \"<|im_end|>\", but ");
}

}  // namespace
}  // namespace streambp
