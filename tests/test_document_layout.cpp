// The layout of documents in models with a recurrence: which rows of the stream the tokens of a batch take.
#include "data/documents/reference_logps.h"
#include "tests/data_files.h"
#include "tests/golden.h"
#include "training/grpo/rollouts.h"

namespace streambp {
namespace {

constexpr DocumentLayout kBlocks = {kDeltaBlock};

// Lengths that are short, or near a multiple of a block or a tile.
Lengths random_lengths(std::uint64_t seed) {
  const Random random(seed);
  std::uint64_t i = 0;
  const auto below = [&](Index n) { return static_cast<Index>(random.below(static_cast<std::uint64_t>(n), i++)); };
  Lengths lengths;
  for (Index documents = 1 + below(12); documents > 0; --documents) {
    const Index kind = below(3), near = kind == 1 ? kDeltaBlock : kTile;
    lengths.push_back(kind == 0 ? 1 + below(40) : std::max<Index>(1, near * (1 + below(3)) + below(5) - 2));
  }
  return lengths;
}

Config small_model() { return make_config("gpt2", {67, 36, 2, 3, 3, 12, 100, 800, true}); }

TEST(DocumentLayout, StartsADocumentThatReachesIntoAnotherTileAtABlock) {
  EXPECT_EQ(kBlocks.start(0, 1000), 0);
  EXPECT_EQ(kBlocks.start(10, 246), 10) << "ends with the tile";
  EXPECT_EQ(kBlocks.start(10, 247), 64);
  EXPECT_EQ(kBlocks.start(64, 247), 64);
  EXPECT_EQ(kBlocks.start(193, 63), 193);
  EXPECT_EQ(kBlocks.start(193, 64), 256);
  EXPECT_EQ(kBlocks.start(255, 1), 255);
  EXPECT_EQ(kBlocks.start(256, 300), 256);
  EXPECT_EQ(kBlocks.start(512 + 1, 256), 512 + 64);
  EXPECT_EQ(kBlocks.end(10, 247), 64 + 247);
  EXPECT_EQ(DocumentLayout().end(10, 247), 10 + 247) << "without a recurrence";
}

// So starting early never takes more rows.
TEST(DocumentLayout, EndsALaterOrLongerDocumentNoEarlier) {
  for (Index free = 0; free < 2 * kTile; ++free) {
    for (Index length = 1; length < 2 * kTile; ++length) {
      ASSERT_LE(kBlocks.end(free, length), kBlocks.end(free + 1, length)) << free << ", " << length;
      ASSERT_LT(kBlocks.end(free, length), kBlocks.end(free, length + 1)) << free << ", " << length;
    }
  }
}

TEST(DocumentLayout, IsThatOfModelsWithARecurrenceOnly) {
  Config c;
  c.mixers = {MixerKind::delta_rule, MixerKind::attention};
  EXPECT_EQ(layout_of(c).block, kDeltaBlock);
  for (const Family& family : families())
    EXPECT_EQ(layout_of(family.config).block, family.config.has_delta_rule() ? kDeltaBlock : 1) << family.name;
}

// In the rows, blocks counted from each document's first row never straddle two tiles, unused rows included.
TEST(RowMap, ObeysTheRuleAndLosesNothing) {
  const Config c = small_model();
  Index moved = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const Batch batch = packed(c, random_lengths(seed), seed);
    const RowMap map(kBlocks, batch);
    if (map.is_identity()) continue;
    ++moved;
    const TokenBatch rows = map.rows(batch);
    const std::vector<double> numbers(batch.tokens.begin(), batch.tokens.end());
    validate(c, rows);
    ASSERT_EQ(rows.size(), kBlocks.rows(batch));
    ASSERT_EQ(rows.documents().size(), batch.documents().size());
    for (std::size_t d = 0; d < batch.documents().size(); ++d) {
      const Rows document = batch.documents()[d], there = rows.documents()[d];
      for (Index block = there.begin; block < there.end; block += kDeltaBlock) {
        const Index last = std::min(block + kDeltaBlock, there.end) - 1;
        ASSERT_EQ(block / kTile, last / kTile) << "seed " << seed << ", document " << d;
      }
      ASSERT_LT(there.size() - document.size(), kDeltaBlock);
      for (Index i = 0; i < there.size(); ++i) {
        const auto row = static_cast<std::size_t>(there.begin + i);
        const auto token = static_cast<std::size_t>(document.begin + std::min(i, document.size() - 1));
        ASSERT_EQ(rows.tokens[row], batch.tokens[token]);
        ASSERT_EQ(rows.positions[row], batch.positions[token]);
        ASSERT_EQ(rows.key_begin[row], there.begin);
        ASSERT_EQ(rows.targets[row], i < document.size() ? batch.targets[token] : -1) << "counted once";
        ASSERT_EQ(map.of_row(numbers, there.begin + i), i < document.size() ? batch.tokens[token] : 0);
      }
    }
    ASSERT_EQ(map.of_tokens(rows.tokens), batch.tokens);
    ASSERT_EQ(map.of_tokens(rows.targets), batch.targets);
    ASSERT_TRUE(RowMap(kBlocks, Batch(rows)).is_identity()) << "the rows obey the rule already";
  }
  EXPECT_GT(moved, 100);
}

TEST(RowMap, IsTheIdentityWhereNothingMoves) {
  const Config c = small_model();
  const std::vector<double> numbers = {3, 4};
  for (const auto& [layout, lengths] : {std::pair<DocumentLayout, Lengths>{{}, {10, 300, 300}},
                                        {kBlocks, {100, 50, 106, 1, 2}},
                                        {kBlocks, {64, 700}}}) {
    const Batch batch = packed(c, lengths);
    const RowMap map(layout, batch);
    EXPECT_TRUE(map.is_identity());
    EXPECT_EQ(layout.rows(batch), batch.size());
    EXPECT_EQ(map.of_row(numbers, 1), 4);
    EXPECT_EQ(map.of_tokens(numbers), numbers);
  }
}

// --- Capacity ---

TEST(DocumentLayout, LeavesRoomForPacksLaidEndToEnd) {
  const Config c = small_model();
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    std::vector<Batch> packs;
    Index most = 0;
    for (std::uint64_t i = 0; i < 3; ++i) {
      packs.push_back(packed(c, random_lengths(3 * seed + i)));
      most = std::max(most, kBlocks.rows(packs.back()));
    }
    ASSERT_LE(kBlocks.rows(end_to_end(packs)), kBlocks.rows_of_packs(3, most));
  }
  EXPECT_EQ(kBlocks.rows_of_packs(3, 512), 3 * 512);
  EXPECT_EQ(kBlocks.rows_of_packs(1, 300), 300);
  EXPECT_EQ(DocumentLayout().rows_of_packs(3, 300), 900);
  for (const Index rows : {20, 256, 300, 1000}) {
    const Index tokens = kBlocks.tokens_that_fit(rows, 2);
    for (Index first = 1; first < tokens; ++first)
      ASSERT_LE(kBlocks.end(kBlocks.end(0, first), tokens - first), rows) << rows << ", " << first;
    EXPECT_EQ(DocumentLayout().tokens_that_fit(rows, 2), rows);
  }
  EXPECT_EQ(kBlocks.tokens_that_fit(1000, 1), 1000);
}

Index rows_of(std::span<const PackedPiece> pack) {
  Index rows = 0;
  for (const PackedPiece& piece : pack) rows = kBlocks.end(rows, piece.length);
  return rows;
}

TEST(DocumentLayout, PacksFitTheirStream) {
  const std::vector<Index> lengths = natural_lengths(4000);
  for (const Index length : {512, 1000, 2048}) {
    for (const Index together : {1, 2}) {
      const auto pieces = together == 1
                              ? cut(lengths, length, TooLong::split)
                              : cut_pairs(lengths, length - kBlocks.most_unused(2), length, TooLong::truncate);
      Packing packing(pieces, length, 3, together, kBlocks), tokens_only(pieces, length, 3, together);
      Index tokens = 0, most = 0, without = 0;
      for (Index n = 0; n < packing.packs(); ++n) {
        for (const PackedPiece& piece : packing.pack(n)) tokens += piece.length;
        most = std::max(most, rows_of(packing.pack(n)));
      }
      for (Index n = 0; n < tokens_only.packs(); ++n) without = std::max(without, rows_of(tokens_only.pack(n)));
      EXPECT_EQ(tokens, packing.tokens());
      EXPECT_LE(most, length);
      EXPECT_GT(without, length) << "tokens alone are too few to count";
    }
  }
}

// What the rule costs, for documents of log-normal lengths.
TEST(DocumentLayout, LeavesFewRowsUnused) {
  const auto share = [](double mean, Index length) {
    std::vector<Index> lengths;
    for (std::size_t i = 0; i < 10'000; ++i)
      lengths.push_back(1 + std::llround(std::exp(std::log(mean) - 0.125 + 0.5 * Random(8).normal(i))));
    Packing packing(cut(lengths, length, TooLong::split), length, 1, 1, kBlocks);
    Index rows = 0;
    for (Index n = 0; n < packing.packs(); ++n) rows += rows_of(packing.pack(n));
    const double unused = static_cast<double>(rows - packing.tokens()) / static_cast<double>(rows);
    std::printf("%.0f tokens a document, %ld rows: %.1f%% of the rows are unused\n", mean, length, 100 * unused);
    return unused;
  };
  for (const Index length : {4096, 16384}) {
    EXPECT_LT(share(300, length), 0.09);
    EXPECT_LT(share(1000, length), 0.04);
  }
}

// Best fit opens a pack only for a piece that fits no other.
TEST(DocumentLayout, OpensAPackOnlyIfNoOtherHasRoom) {
  const auto packs = [](std::vector<Index> lengths, Index length) {
    return Packing(cut(lengths, length, TooLong::refuse), length, 1, 1, kBlocks).packs();
  };
  EXPECT_EQ(packs(std::vector<Index>(20, 128), 512), 5);
  EXPECT_EQ(packs(std::vector<Index>(6, 160), 512), 2) << "at 0, 192 and 352";
  EXPECT_EQ(packs(std::vector<Index>(6, 170), 512), 3) << "the third would end at 532";
}

class LaidOutFiles : public GroupFiles {};

TEST_F(LaidOutFiles, ReferenceLogProbsAreComputedInBatchesThatFit) {
  std::vector<Document> documents;
  for (const Index length : {100, 200, 150, 40, 500, 70}) {
    Document& document = documents.emplace_back();
    const Tokens tokens(static_cast<std::size_t>(length), 3);
    document.add(tokens, InLoss::yes);
  }
  const TokenFile file = token_file(documents);
  const auto most_rows = [&](const DocumentLayout& layout) {
    Index most = 0;
    const auto logps = compute_reference(
        file, {500, 512, 1, layout},
        [&](const std::vector<Batch>& batches) {
          std::vector<std::vector<double>> all;
          for (const Batch& batch : batches) {
            most = std::max(most, kBlocks.rows(batch));
            all.emplace_back(batch.tokens.size(), -1);
          }
          return all;
        },
        [](double) {});
    EXPECT_EQ(std::ranges::count(logps, -1), file.token_count());
    return most;
  };
  EXPECT_LE(most_rows(kBlocks), 512);
  EXPECT_GT(most_rows({}), 512);
}

// A pair may leave rows unused, so it has fewer tokens than the stream has rows.
TEST_F(LaidOutFiles, PairsFitTheirStream) {
  TokenWriter writer(dir / "t.safetensors");
  for (const Index length : {100, 412, 60, 380}) {
    Document document;
    document.add(Tokens(static_cast<std::size_t>(length), static_cast<std::int32_t>(length % 7)), InLoss::yes);
    writer.add(document);
  }
  writer.finish({{"kind", "preferences"}});
  const TokenFile file(dir / "t.safetensors");
  DocumentSettings s = {.evaluation_fraction = 0,
                        .length = 512,
                        .longest = 512,
                        .packs = 1,
                        .micro_batches = 1,
                        .seed = 1,
                        .too_long = TooLong::truncate,
                        .layout = kBlocks};
  Documents documents(file, s);
  EXPECT_EQ(documents.too_long, 1);
  for (Index step = 1; step <= 2; ++step) EXPECT_LE(kBlocks.rows(documents.batch(step, 0)), 512);
  s.too_long = TooLong::refuse, s.remedy = [](Index rows) { return "use " + std::to_string(rows); };
  EXPECT_PRED2(contains, error_of([&] { Documents(file, s); }),
               "1 of 2 pairs is longer than the 449 tokens of a stream, the longest has 512; use 575");
}

TEST(DocumentLayout, RolloutsFillBatchesByRows) {
  const std::vector<Rollout> rollouts(8, Rollout{Tokens(101, 2), 3, 1});
  const auto batches = batches_of(rollouts, 400, 1, kBlocks);
  ASSERT_EQ(batches.size(), 3u) << "without unused rows, four fit into one";
  for (const Batch& batch : batches) EXPECT_LE(kBlocks.rows(batch), 400);
}

// --- The trainer ---

struct LaidOut {
  double loss;
  std::vector<double> logp, evaluated;
  HostGradient gradient;
};

// The gradient of a batch of a model without a recurrence, with the layout of one that has it.
LaidOut run(const Config& c, const Batch& batch, const DocumentLayout& layout, const Objective& objective = {}) {
  const Schedule schedule = Schedule::stream(kTile, kTile);
  const Index rows = layout.rows(batch);
  StepSettings settings{c, DType::f64, OptimizerKind::none, 1};
  settings.objective = objective;
  Cpu dev(plan(settings, rows, schedule).peak);
  Trainer<Cpu, double> trainer(dev, c, rows, OptimizerKind::none, objective);
  trainer.layout = layout;
  trainer.initialise(3, 0.15);
  const Measures measures = trainer.accumulate(batch, Counts(batch), schedule);
  EXPECT_EQ(trainer.view.division.rows, rows);
  LaidOut result = {measures.loss, trainer.log_probabilities(), {}, host_gradient(dev, c, trainer.grad)};
  trainer.release_gradient();
  result.evaluated = trainer.evaluate(batch, schedule);
  return result;
}

void expect_equal(const Config& c, const Batch& batch, const Objective& objective, const std::string& what) {
  ASSERT_FALSE(RowMap(kBlocks, batch).is_identity());
  const LaidOut plain = run(c, batch, {}, objective), laid_out = run(c, batch, kBlocks, objective);
  for (std::size_t t = 0; t < plain.logp.size(); ++t)
    ASSERT_EQ(laid_out.logp[t], plain.logp[t]) << what << ", token " << t;
  EXPECT_EQ(laid_out.evaluated, laid_out.logp) << what;
  EXPECT_NEAR(laid_out.loss, plain.loss, 1e-12) << what;
  const Difference difference = laid_out.gradient.difference(plain.gradient);
  EXPECT_LE(difference.relative, 1e-12) << what << ": " << difference.tensor;
}

const Lengths kMoved = {70, 200, 5, 60};  // at 0, 128, 328 and 333

TEST(DocumentLayout, ChangesNoLogProbAndNoGradient) {
  for (const Family& family : distinct_families()) {
    Config c = family.config;
    if (c.has_delta_rule()) continue;  // its numbers depend on where blocks begin
    c.balanced = false;                // only where there are blocks, unused rows are marked for it
    if (c.positions == Positions::learned) c.max_length = std::ranges::max(kMoved);
    expect_equal(c, packed(c, kMoved), {}, family.name);
  }
}

TEST(DocumentLayout, ChangesNoObjective) {
  using enum ObjectiveKind;
  const Config c = make_config("qwen3", {67, 32, 2, 4, 2, 8, 64, 800, false});
  const Batch tokens = packed(c, kMoved), batch = with_objective_data(tokens, run(c, tokens, {}).logp);
  Objective mine = {.kind = own};
  mine.loss = [&](const Batch& of, const std::vector<double>& logps, std::vector<double>& weights) {
    EXPECT_EQ(of.size(), batch.size());
    double loss = 0;
    for (std::size_t t = 0; t < logps.size(); ++t)
      if (of.targets[t] >= 0) weights[t] = 0.01 * static_cast<double>(t % 7), loss += weights[t] * logps[t];
    return loss;
  };
  expect_equal(c, batch, mine, "own");
  expect_equal(c, batch, {.kind = dpo}, "dpo");
  expect_equal(c, batch, {.kind = dpo, .preference = Preference::ipo}, "ipo");
  expect_equal(c, batch, {.kind = sft, .mean = Mean::documents}, "documents");
  expect_equal(c, batch, {.kind = grpo, .mean = Mean::documents, .kl = 0.2}, "grpo");
}

// A plan of several documents has the starts that a batch of them would have, so fewer of them fit.
TEST(DocumentLayout, IsPlanned) {
  const Config c = small_model();
  for (const Index documents : {1, 3, 11}) {
    Plan dev;
    Trainer<Plan, float> trainer(dev, c, 1500, OptimizerKind::none);
    trainer.layout = kBlocks;
    trainer.plan_step(1, Schedule::stream(kTile, kTile), OptimizerKind::none, documents);
    TokenBatch planned;
    planned.key_begin = trainer.view.key_begin_on_host;
    planned.tokens.resize(planned.key_begin.size());
    EXPECT_TRUE(RowMap(kBlocks, planned).is_identity());
    EXPECT_EQ(std::ssize(planned.documents()), documents == 1 ? 0 : documents == 3 ? 3 : 9) << "some rows are unused";
  }
}

}  // namespace
}  // namespace streambp
