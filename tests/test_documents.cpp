// The batches that training and evaluation take from token files: texts, pairs and groups.
#include "tests/data_files.h"

namespace streambp {
namespace {

// Pairs of a prompt and two answers. All tokens differ except those of the shared prompts, and the reference log-prob of a
// target is a function of it.
class Preferences : public DataFiles {
 protected:
  void make(const std::vector<std::array<Index, 3>>& lengths) {
    TokenWriter writer(dir / "t.safetensors");
    std::int32_t token = 0;
    for (const auto& [prompt, chosen, rejected] : lengths) {
      Document begin;
      for (Index i = 0; i < prompt; ++i, ++token) begin.add({&token, 1}, InLoss::no);
      for (const Index answer : {chosen, rejected}) {
        Document document = begin;
        for (Index i = 0; i < answer; ++i, ++token) document.add({&token, 1}, InLoss::yes);
        writer.add(document);
      }
    }
    writer.finish({{"kind", "preferences"}});
    file.emplace(dir / "t.safetensors");
    config = make_config("llama", {token, 8, 1, 1, 1, 8, 8, 0, true});
  }
  static float given(std::int32_t token) { return -0.5f - static_cast<float>(token); }
  std::vector<float> reference() const {
    std::vector<float> reference;
    for (Index d = 0; d < file->documents(); ++d) {
      const auto tokens = file->tokens(d);
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        reference.push_back(i + 1 < tokens.size() ? given(tokens[i + 1]) : NAN);
      }
    }
    return reference;
  }
  Documents documents(Index length, TooLong too_long, double evaluation_fraction = 0) const {
    return Documents(*file, {.evaluation_fraction = evaluation_fraction,
                             .length = length,
                             .longest = length,
                             .packs = 2,
                             .micro_batches = 3,
                             .seed = 5,
                             .too_long = too_long});
  }
  // Checks a batch, and counts its pairs by their first token.
  void look(const Batch& batch, bool attached, std::map<std::int32_t, int>& pairs) const {
    validate(config, batch);
    std::vector<std::size_t> begin;
    for (std::size_t i = 0; i < batch.tokens.size(); ++i) {
      if (batch.positions[i] == 0) begin.push_back(i);
    }
    ASSERT_EQ(begin.size() % 2, 0u);
    begin.push_back(batch.tokens.size());
    for (std::size_t d = 0; d + 1 < begin.size(); d += 2) {
      ASSERT_EQ(batch.tokens[begin[d]], batch.tokens[begin[d + 1]]);  // one prompt
      std::int32_t last[2] = {-1, -1};
      for (const std::size_t side : {0, 1}) {
        for (std::size_t i = begin[d + side]; i < begin[d + side + 1]; ++i) {
          last[side] = std::max(last[side], batch.targets[i]);
        }
        ASSERT_GE(last[side], 0);
      }
      ASSERT_LT(last[0], last[1]);  // the chosen one came first
      ++pairs[batch.tokens[begin[d]]];
    }
    ASSERT_EQ(batch.reference.size(), attached ? batch.tokens.size() : 0u);
    for (std::size_t i = 0; i < batch.reference.size(); ++i) {
      ASSERT_EQ(batch.reference[i], batch.targets[i] < 0 ? 0 : static_cast<double>(given(batch.targets[i])));
    }
  }

  std::optional<TokenFile> file;
  Config config;
};

TEST_F(Preferences, ComeOncePerEpochOrAreHeldOut) {
  std::vector<std::array<Index, 3>> lengths;
  for (std::uint64_t i = 0; i < 300; ++i) {
    const auto length = [&](std::uint64_t use) { return 1 + static_cast<Index>(Random(i).below(30, use)); };
    lengths.push_back({length(0), length(1), length(2)});
  }
  make(lengths);
  for (const bool attached : {false, true}) {
    Documents all = documents(120, TooLong::split, 0.08);  // none is too long
    EXPECT_EQ(all.left_out, 0);
    if (attached) all.attach(reference());
    std::map<std::int32_t, int> learned, held_out;
    for (const Batch& batch : all.evaluation) look(batch, attached, held_out);
    EXPECT_GT(held_out.size(), 10u);
    for (Index step = 1; static_cast<double>(step) <= std::ceil(all.steps()); ++step) {
      for (Index i = 0; i < 3; ++i) look(all.batch(step, i), attached, learned);
    }
    for (const auto& [pair, times] : held_out) EXPECT_FALSE(learned.contains(pair)) << times;
    EXPECT_EQ(learned.size() + held_out.size(), lengths.size());
    // the last step continues in the next epoch
    Index twice = 0;
    for (const auto& [pair, times] : learned) EXPECT_LE(times, 2), twice += times == 2;
    EXPECT_LT(twice, static_cast<Index>(learned.size()) / 4);
    // a resumed run sees the same
    Documents resumed = documents(120, TooLong::split, 0.08);
    if (attached) resumed.attach(reference());
    for (const Index step : {9, 2}) {
      const Batch before = all.batch(step, 1), after = resumed.batch(step, 1);
      EXPECT_EQ(before.tokens, after.tokens);
      EXPECT_EQ(before.targets, after.targets);
      EXPECT_EQ(before.reference, after.reference);
    }
  }
}

TEST_F(Preferences, ThatAreTooLongAreCutOrLeftOut) {
  make({{4, 3, 20}, {4, 3, 3}, {10, 5, 8}, {4, 30, 30}, {9, 1, 30}, {30, 4, 4}});
  EXPECT_ERROR(documents(20, TooLong::split),
               "5 of 6 pairs are longer than the 20 tokens of a stream, the longest has 68; "
               "say with --too-long what to do with them: truncate or drop");
  Documents dropped = documents(20, TooLong::drop);
  EXPECT_EQ(dropped.too_long, 5);
  EXPECT_EQ(dropped.left_out, 0);
  EXPECT_EQ(dropped.cut_off, 0);
  EXPECT_ERROR(documents(5, TooLong::truncate), "no document has a target");
  Documents cut = documents(20, TooLong::truncate);
  EXPECT_EQ(cut.left_out, 1);  // the last: its prompt leaves no room
  EXPECT_TRUE(cut.evaluation.empty());
  cut.attach(reference());
  std::map<std::int32_t, int> pairs;
  for (Index i = 0; i < 3; ++i) look(cut.batch(1, i), true, pairs);
  EXPECT_EQ(pairs.size(), 5u);
  EXPECT_ERROR(cut.attach(std::vector<float>(7)), "there are 7 reference log-probs");
}

// Answers that differ only after the cut.
TEST_F(Preferences, ThatAreEqualAfterCuttingAreLeftOut) {
  std::vector<Document> pairs;
  for (const std::int32_t last : {8, 9}) pairs.push_back({{1, 2, 3, 4, 5, last}, {0, 1, 1, 1, 1, 1}});
  for (const std::int32_t only : {8, 9}) pairs.push_back({{1, only}, {0, 1}});
  file.emplace(token_file(pairs, {{"kind", "preferences"}}));
  EXPECT_EQ(documents(12, TooLong::refuse).left_out, 0);
  EXPECT_EQ(documents(10, TooLong::truncate).left_out, 0);  // the sixth tokens are targets
  EXPECT_EQ(documents(8, TooLong::truncate).left_out, 1);
}

TEST_F(Preferences, BatchesHaveReferenceLogProbsForAllTokensOrNone) {
  make({{2, 2, 2}});
  Documents pair = documents(8, TooLong::refuse);
  pair.attach(reference());
  const Batch good = pair.batch(1, 0);
  EXPECT_EQ(error_of([&] { require_shape(good); }), "");
  for (const double wrong : {-std::numeric_limits<double>::infinity(), std::nan("")}) {
    Batch bad = good;
    bad.reference[1] = wrong;
    EXPECT_ERROR(require_shape(bad), "reference log-probs of a batch is ");
  }
  Batch bad = good;
  bad.reference.pop_back();
  EXPECT_ERROR(require_shape(bad), "reference log-probs");
}

// A text in a file of its own is for training on pieces; an example is whole, unless the user chooses otherwise.
TEST_F(DataFiles, TextsAreCutAndLongDocumentsRefused) {
  TokenWriter writer(dir / "t.safetensors");
  for (const std::size_t length : {4, 30, 5, 21}) writer.add({Tokens(length, 1), std::vector<std::uint8_t>(length, 1)});
  const auto part = [](const char* form) {
    return Json{{"name", form}, {"form", form}, {"documents", 2}, {"weight", 0}};
  };
  writer.finish({{"parts", Json{part("plain text"), part("text")}.dump()}});
  const TokenFile file(dir / "t.safetensors");
  const auto with = [&](TooLong too_long, Index length = 10) {
    DocumentSettings s{0, length, length, 1, 1, 1, too_long};
    s.remedy = [](Index tokens) { return "use " + std::to_string(tokens); };
    return Documents(file, s);
  };
  EXPECT_EQ(file.longest_together(), 30);
  EXPECT_EQ(file.longest_whole(), 21);
  EXPECT_ERROR(with(TooLong::refuse),
               "1 of 4 documents is longer than the 10 tokens of a stream, the longest has 21; use 21, "
               "or say with --too-long what to do with them: split, truncate or drop");
  EXPECT_EQ(with(TooLong::refuse, 21).too_long, 0);
  // The last token of the long document is a piece alone, without a target.
  const std::map<TooLong, Index> tokens = {{TooLong::split, 59}, {TooLong::truncate, 49}, {TooLong::drop, 39}};
  for (const auto& [choice, all] : tokens) {
    Documents documents = with(choice);
    EXPECT_EQ(documents.too_long, 1);
    EXPECT_EQ(documents.left_out, 0);
    Index found = 0;
    for (Index step = 1; static_cast<double>(step) <= documents.steps(); ++step)
      found += documents.batch(step, 0).size();
    EXPECT_EQ(found, all) << static_cast<int>(choice);
  }
}

// Each learned token is a target exactly once per epoch, even where long documents are split.
TEST_F(DataFiles, BatchesHaveEachTargetOnce) {
  TokenWriter writer(dir / "t.safetensors");
  std::map<std::int32_t, int> expected;  // tokens are all different
  std::int32_t token = 0;
  for (const Index length : natural_lengths(200)) {
    Document document;
    for (Index i = 0; i < length; ++i, ++token) {
      const bool learn = i > 0 && Random(2).below(3, static_cast<std::uint64_t>(token)) > 0;
      document.add({&token, 1}, InLoss{learn});
      if (learn) ++expected[token];
    }
    writer.add(document);
  }
  writer.finish({});
  const TokenFile file(dir / "t.safetensors");
  Packing packing(cut(file.lengths(), 300, TooLong::split), 300, 1);
  Config config = make_config("llama", {token, 8, 1, 1, 1, 8, 8, 0, true});
  std::map<std::int32_t, int> predicted;
  Index tokens = 0;
  for (Index n = 0; n < packing.packs(); ++n) {
    Batch batch;
    append(batch, file, packing.pack(n));
    validate(config, batch);
    tokens += batch.size();
    for (std::size_t i = 0; i < batch.targets.size(); ++i) {
      if (batch.targets[i] < 0) continue;
      EXPECT_EQ(batch.targets[i], batch.tokens[i] + 1);
      ++predicted[batch.targets[i]];
    }
    Index at = 0;
    for (const PackedPiece& piece : packing.pack(n)) {
      for (Index i = 0; i < piece.length; ++i, ++at) {
        ASSERT_EQ(batch.positions[static_cast<std::size_t>(at)], i);
        ASSERT_EQ(batch.key_begin[static_cast<std::size_t>(at)], at - i);
      }
    }
  }
  EXPECT_EQ(tokens, file.token_count());
  EXPECT_EQ(predicted, expected);
}

TEST_F(GroupFiles, GiveBatchesTheirAdvantagesAndOldLogProbs) {
  const TokenFile known = file({a, b});
  const DocumentSettings settings{.evaluation_fraction = 0,
                                  .length = 5,
                                  .longest = 5,
                                  .packs = 1,
                                  .micro_batches = 1,
                                  .seed = 1,
                                  .too_long = TooLong::split,
                                  .scaled = false};
  Documents data(known, settings);
  const Batch batch = data.batch(1, 0);
  const bool first = batch.targets[0] == 2;  // packs are shuffled
  using Numbers = std::vector<double>;
  EXPECT_EQ(batch.advantages, first ? (Numbers{0.5, 0.5, 0.5, -0.5, -0.5}) : (Numbers{-0.5, -0.5, 0.5, 0.5, 0.5}));
  EXPECT_EQ(batch.old, first ? (Numbers{-1, -2, 0, -3, 0}) : (Numbers{-3, 0, -1, -2, 0}));
  EXPECT_TRUE(batch.reference.empty());
  data.attach(std::vector<float>{-5, -6, 0, -7, 0});
  EXPECT_EQ(data.batch(1, 0).old, batch.old) << "log-probs in the data take precedence";
  EXPECT_EQ(data.batch(1, 0).reference, first ? (Numbers{-5, -6, 0, -7, 0}) : (Numbers{-7, 0, -5, -6, 0}));
  // Without old log-probs, the reference model counts as the sampler.
  Document x = a, y = b;
  x.old.clear(), y.old.clear();
  Documents unknown(file({x, y}), settings);
  EXPECT_TRUE(unknown.batch(1, 0).old.empty());
  unknown.attach(std::vector<float>{-5, -6, 0, -7, 0});
  EXPECT_EQ(unknown.batch(1, 0).old, unknown.batch(1, 0).reference);
  // Groups are held out as a whole.
  std::vector<Document> many;
  for (std::int32_t prompt = 0; prompt < 40; ++prompt) {
    for (std::int32_t answer = 0; answer < 3; ++answer) {
      many.push_back({{prompt, 100 + prompt, answer}, {0, 0, 1}, Advantage{1, 1}});
    }
  }
  DocumentSettings apart = settings;
  apart.evaluation_fraction = 0.3;
  apart.length = apart.longest = 9;
  Documents split(file(many), apart);
  std::map<std::int32_t, int> held_out, trained;
  const auto count = [](const Batch& b, std::map<std::int32_t, int>& times) {
    for (const std::int32_t token : b.tokens) times[token] += token >= 100;
  };
  for (const Batch& b : split.evaluation) count(b, held_out);
  for (Index step = 1; static_cast<double>(step) <= std::ceil(split.steps()); ++step)
    count(split.batch(step, 0), trained);
  std::erase_if(held_out, [](const auto& x) { return x.second == 0; });
  std::erase_if(trained, [](const auto& x) { return x.second == 0; });
  EXPECT_GT(held_out.size(), 4u);
  EXPECT_LT(held_out.size(), 8 * 3 + 1);  // of eight batches
  for (const auto& [prompt, times] : held_out) EXPECT_FALSE(trained.contains(prompt)) << prompt;
  for (const auto& [prompt, times] : trained) EXPECT_EQ(times, 3) << prompt;
  // No completion is split.
  DocumentSettings narrow = settings;
  narrow.length = narrow.longest = 2;
  EXPECT_ERROR(Documents(known, narrow), "1 of 2 completions is longer than the 2 tokens of a stream");
  narrow.too_long = TooLong::truncate;
  EXPECT_EQ(Documents(known, narrow).batch(1, 0).size(), 2);
}

}  // namespace
}  // namespace streambp
