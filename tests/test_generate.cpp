// Generation: logits match the walk over whole sequences for any batching, and log-probs of sampled tokens are those of
// training.
#include "data/files/checkpoint.h"
#include "generation/generate.h"
#include "tests/support.cuh"
#include "training/grpo/rollouts.h"

namespace streambp {
namespace {

Tokens random_tokens(const Config& c, Index count, std::uint64_t seed) {
  Tokens tokens;
  for (Index i = 0; i < count; ++i) {
    tokens.push_back(static_cast<std::int32_t>(
        Random(seed).below(static_cast<std::uint64_t>(c.vocab), static_cast<std::uint64_t>(i))));
  }
  return tokens;
}

// A model with its memory, and room for tests.
template <class T>
struct Subject {
  Cpu dev{std::size_t{1} << 28};
  Model<T> model;

  explicit Subject(const Config& c) : model{c, Tensors<T>(c)} {
    allocate(dev, table(c, model.weights), Kind::weights);
    initialise(dev, model, 3, 0.15);
  }

  // The logits after each token of a sequence, computed by one forward pass of the walk.
  Matrix<T> logits(const Tokens& text) {
    Batch batch;
    batch.append(text);
    const auto n = static_cast<Index>(text.size());
    Stream stream = allocate_stream(dev, {n});
    dev.upload(stream.tokens, batch.tokens.data());
    dev.upload(stream.positions, batch.positions.data());
    dev.upload(stream.key_begin, batch.key_begin.data());
    Walk<Cpu, T> walk(dev, model, stream, {KeptParts::nothing(), kTile, kTile}, {});
    return Head<Cpu, T>(dev, model.config, model.weights).logits(walk.forward());
  }
};

// max |logits - truth| / max |truth| for a row of the truth.
template <class T>
double error(std::span<const T> logits, Matrix<T> truth, Index row) {
  double difference = 0, largest = 0;
  for (Index j = 0; j < truth.cols; ++j) {
    difference =
        std::max(difference, std::abs(static_cast<double>(logits[index(j)]) - static_cast<double>(truth(row, j))));
    largest = std::max(largest, std::abs(static_cast<double>(truth(row, j))));
  }
  return difference / largest;
}

const auto kQuietly = [](std::size_t, const Continuation&) {};

class EveryGenerator : public testing::TestWithParam<Family> {};
INSTANTIATE_TEST_SUITE_P(Generate, EveryGenerator, testing::ValuesIn(walked_families()), PrintFamily());

// Sequences of different lengths are read in parallel, some by one token and some by many, in chunks that split them
// anywhere.
template <class T>
void expect_logits_of_whole_texts(const Config& c, double tolerance) {
  const Lengths lengths = sized<Lengths>({300, 7, 131, 270}, {90, 7, 31, 70});
  Subject<T> subject(c);
  std::vector<Tokens> texts;
  std::vector<Matrix<T>> truths;
  for (Index length : lengths) {
    texts.push_back(random_tokens(c, length, static_cast<std::uint64_t>(length)));
    truths.push_back(subject.logits(texts.back()));
  }
  for (Index chunk : {64, 1000}) {
    Generator<Cpu, T> generator(subject.dev, subject.model, {4, 300, chunk});
    const Random random(5);
    for (std::uint64_t step = 0;; ++step) {
      std::vector<typename Generator<Cpu, T>::Reading> readings;
      for (Index slot = 3; slot >= 0; --slot) {  // not in the slots' order
        const Tokens& text = texts[index(slot)];
        const std::size_t begin = generator.text(slot).size(), left = text.size() - begin;
        const bool long_one = random.below(9, 8 * step + static_cast<std::uint64_t>(slot)) == 0;
        if (left > 0)
          readings.push_back({slot, std::span(text).subspan(begin, std::min<std::size_t>(left, long_one ? 90 : 1))});
      }
      if (readings.empty()) break;
      const std::vector<T> logits = generator.read(readings);
      ASSERT_EQ(static_cast<Index>(logits.size()), c.vocab * static_cast<Index>(readings.size()));
      for (std::size_t i = 0; i < readings.size(); ++i) {
        const Index slot = readings[i].slot, row = static_cast<Index>(generator.text(slot).size()) - 1;
        const auto mine = std::span<const T>(logits).subspan(i * index(c.vocab), index(c.vocab));
        ASSERT_LE(error(mine, truths[index(slot)], row), tolerance) << "slot " << slot << ", token " << row;
      }
    }
    for (Index slot = 0; slot < 4; ++slot) EXPECT_EQ(generator.text(slot), texts[index(slot)]);
  }
}

TEST_P(EveryGenerator, MatchesFullForwardLogitsInFloat64) {
  expect_logits_of_whole_texts<double>(GetParam().config, 1e-10);
}
// A completion does not depend on the other sequences or on the number of slots.
TEST_P(EveryGenerator, CompletionsDoNotDependOnOtherSequences) {
  const Config& c = GetParam().config;
  Subject<double> subject(c);
  std::vector<Tokens> prompts;
  for (Index length : {5, 40, 1, 17, 40, 3})
    prompts.push_back(random_tokens(c, length, static_cast<std::uint64_t>(length)));
  GenerationSettings settings{{.temperature = 0.9, .top_p = 0.9, .top_k = 20, .seed = 7}, 30, {2, 9}};
  std::vector<std::vector<Tokens>> results;
  for (Index slots : {1, 2, 6}) {
    Generator<Cpu, double> generator(subject.dev, subject.model, {slots, 100, 32});
    std::vector<Tokens> told(prompts.size()), tokens;
    const auto texts = generate(generator, prompts, settings, [&](std::size_t i, const Continuation& text) {
      EXPECT_TRUE(told[i].size() < 30 && text.tokens.size() == told[i].size() + 1);
      told[i] = text.tokens;
    });
    for (std::size_t i = 0; i < texts.size(); ++i) {
      tokens.push_back(texts[i].tokens);
      const bool stopped = settings.stop.count(texts[i].tokens.back()) > 0;
      EXPECT_EQ(texts[i].end, stopped ? Ending::stop : Ending::length);
      EXPECT_TRUE(stopped || texts[i].tokens.size() == 30u);
      EXPECT_EQ(told[i], texts[i].tokens);
    }
    results.push_back(tokens);
    EXPECT_EQ(results.front(), results.back()) << slots << " slots";
  }
  EXPECT_NE(results[0][1], results[0][4]) << "a repeated prompt uses different random numbers";
}

// --- Log-probs of sampled tokens have the bits that training and evaluation compute ---

// Prompts of several lengths. Most share a prefix of more than a tile of keys, and one occurs twice.
std::vector<Tokens> related_prompts(const Config& c) {
  const Tokens shared = random_tokens(c, 280, 1);
  std::vector<Tokens> prompts;
  for (const Index length : sized<Lengths>({280, 131, 3, 140, 131}, {140, 131, 3, 131})) {
    prompts.push_back(random_tokens(c, length, 2));
    if (length > 3) std::copy_n(shared.begin(), length - 2, prompts.back().begin());
  }
  return prompts;
}

// The completed prompts, packed. The loss covers the completions.
Batch packed_texts(const std::vector<Tokens>& prompts, const std::vector<Continuation>& completions) {
  Batch batch;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    Rollout rollout{prompts[i], static_cast<Index>(prompts[i].size()), i % 2 ? -1.0 : 1.0};
    rollout.tokens.insert(rollout.tokens.end(), completions[i].tokens.begin(), completions[i].tokens.end());
    append(batch, rollout);
  }
  return batch;
}

// The log-probs of sampling for the tokens of packed_texts().
std::vector<double> sampled_logps(const Batch& batch, const std::vector<Continuation>& completions) {
  std::vector<double> logps(batch.targets.size());
  auto completion = completions.begin();
  for (const Rows rows : batch.documents()) {
    auto logp = completion++->logps.begin();
    for_each_target(batch, rows, [&](std::size_t t) { logps[t] = *logp++; });
  }
  return logps;
}

// For any sampling and any number of sequences in parallel.
template <class T>
void expect_logps_of_training(const Config& c) {
  Subject<T> subject(c);
  const std::vector<Tokens> prompts = related_prompts(c);
  const Sampling samplings[] = {
      {}, {.temperature = 0}, {.temperature = 0.5, .top_p = 0.9, .top_k = 5, .repetition_penalty = 1.3}};
  Cpu dev(std::size_t{1} << 28);
  Trainer<Cpu, T> trainer(dev, c, 800, OptimizerKind::none);
  initialise(dev, trainer.model, 3, 0.15);
  for (const auto& [slots, chunk] : {std::pair<Index, Index>{1, 64}, {3, 256}, {5, 1000}}) {
    Generator<Cpu, T> generator(subject.dev, subject.model, {slots, 320, chunk});
    const auto completions = generate(generator, prompts, {samplings[slots / 2], 12, {}}, kQuietly);
    const Batch batch = packed_texts(prompts, completions);
    const std::vector<Accumulator<T>> logps = trainer.evaluate(batch, Schedule::stream(kTile, kTile));
    EXPECT_EQ(sampled_logps(batch, completions), std::vector<double>(logps.begin(), logps.end())) << slots << " slots";
  }
}

TEST_P(EveryGenerator, SampledLogProbsAreThoseOfTraining) {
  expect_logps_of_training<float>(GetParam().config);
  expect_logps_of_training<BFloat16>(GetParam().config);
  expect_logps_of_training<double>(GetParam().config);
}

// So GRPO's policy ratio is exactly 1 before the first update: no ratio is clipped even if none may differ from 1, and
// the gradient is the gradient without ratios.
TEST_P(EveryGenerator, PolicyRatiosOfSampledTokensAreOne) {
  const Config& c = GetParam().config;
  Subject<float> subject(c);
  const std::vector<Tokens> prompts = related_prompts(c);
  Generator<Cpu, float> generator(subject.dev, subject.model, {2, 320, 256});
  const auto completions = generate(generator, prompts, {{}, 12, {}}, kQuietly);
  Batch batch = packed_texts(prompts, completions);
  const Objective objective{.kind = ObjectiveKind::grpo, .clip_low = 0, .clip_high = 0};
  const Schedule schedule = Schedule::stream(kTile, kTile);
  const GradientRun without = run_gradient<Cpu, float>(c, batch, schedule, random_weights(), objective);
  batch.old = sampled_logps(batch, completions);
  const GradientRun with = run_gradient<Cpu, float>(c, batch, schedule, random_weights(), objective);
  EXPECT_TRUE(with.gradient == without.gradient && with.loss == without.loss);
  EXPECT_EQ(with.others.at("clip_fraction"), 0);
}

// A repetition penalty counts the tokens of the prompt, in the cache or not, and of the completion; for any slots and chunks.
TEST(Generate, PenalisesTheTokensOfPromptAndCompletion) {
  const Config c = families()[3].config;
  Subject<float> subject(c);
  std::vector<Tokens> prompts = related_prompts(c);
  prompts.erase(prompts.begin());  // the longest
  const GenerationSettings settings{{.temperature = 0, .repetition_penalty = 4}, 5};
  Generator<Cpu, float> one(subject.dev, subject.model, {1, 320, 64});
  const auto completions = generate(one, prompts, settings, kQuietly);
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    Generator<Cpu, float> truth(subject.dev, subject.model, {1, 320, 320});
    Tokens text = prompts[i], unread = text;
    for (const std::int32_t token : completions[i].tokens) {
      const auto logits = penalised<float>(truth.read({{0, unread}}), text, 4);
      EXPECT_EQ(token, std::ranges::max_element(logits) - logits.begin());
      unread = {token}, text.push_back(token);
    }
  }
  Generator<Cpu, float> three(subject.dev, subject.model, {3, 320, 256});
  const auto again = generate(three, prompts, settings, kQuietly);
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(again[i].tokens, completions[i].tokens);
    EXPECT_EQ(again[i].logps, completions[i].logps);
  }
}

TEST(Generate, OnTokenMayEndAText) {
  const Config c = families()[3].config;
  Subject<float> subject(c);
  Generator<Cpu, float> generator(subject.dev, subject.model, {1, 50, 16});
  const std::vector<Tokens> prompts = {random_tokens(c, 5, 1), random_tokens(c, 9, 2)};
  const auto texts = generate(generator, prompts, {{}, 8}, [](std::size_t i, Continuation& text) {
    if (i == 0 && text.tokens.size() == 3) text.end = Ending::text;
  });
  EXPECT_EQ(texts[0].tokens.size(), 3u);
  EXPECT_EQ(texts[0].end, Ending::text);
  EXPECT_EQ(texts[1].tokens.size(), 8u);
}

TEST(Generate, ReusesPrefixesOfAnySlot) {
  const Config c = families()[3].config;
  Subject<double> subject(c);
  Generator<Cpu, double> generator(subject.dev, subject.model, {3, 50, 16});
  const Tokens text = random_tokens(c, 40, 1);
  EXPECT_EQ(generator.start(0, text, 50, {}), 0);
  generator.read({{0, text}});
  EXPECT_EQ(generator.start(0, text, 50, {}), 39) << "the last token is read again";
  EXPECT_EQ(generator.start(1, text, 50, {}), 39) << "from another slot";
  EXPECT_EQ(generator.text(1), Tokens(text.begin(), text.begin() + 39));

  Tokens other(text.begin(), text.begin() + 20);  // diverges from the first sequence
  other.push_back((text[20] + 1) % static_cast<std::int32_t>(c.vocab));
  other.push_back(text[3]);
  const Matrix<double> truth = subject.logits(other);
  for (auto [slot, known] : {std::pair<Index, Index>{0, 20}, {2, 21}}) {  // slot 2 finds all but the last in slot 0
    EXPECT_EQ(generator.start(slot, other, 50, {}), known);
    const auto logits = generator.read({{slot, std::span(other).subspan(index(known))}});
    EXPECT_LE(error<double>(logits, truth, 21), 1e-10);
  }
  const auto logits = generator.read({{1, std::span(text).subspan(39)}});
  EXPECT_LE(error<double>(logits, subject.logits(text), 39), 1e-10) << "slot 1 keeps what it shared with slot 0";
  EXPECT_EQ(generator.start(0, Tokens{}, 50, {}), 0);
}

// Completions share the whole pages of their prompt. When there are too few pages for all slots, the next prompts wait. Each
// completion has the same tokens and log-probs as alone in a generator.
TEST(Generate, CompletionsShareThePagesOfTheirPrompt) {
  EXPECT_EQ((GenerationShape{8, 320, 64, 8, 300, 20}.pages()), 2 + 8 * 2);
  EXPECT_EQ((GenerationShape{8, 320, 64, 1, 300, 20}.pages()), 8 * 3);
  EXPECT_EQ((GenerationShape{9, 513, 64, 4, 257, 256}.pages()), 3 * 2 + 9 * 3);
  EXPECT_EQ((GenerationShape{9, 400, 64, 4, 130, 270}.pages()), 9 * 4) << "no more than without samples";
  const Config c = families()[3].config;
  Subject<float> subject(c);
  const GenerationSettings settings{{.seed = 4}, 20, {2, 9, 31}};
  for (const bool same_prompts : {true, false}) {
    std::vector<Tokens> prompts;
    for (const Index length : sized<Lengths>({300, 256, 129, 5}, {140, 128})) {
      const Tokens prompt = random_tokens(c, length, 1);  // one is the beginning of another
      for (std::int32_t sample = 0; sample < 4; ++sample) {
        prompts.push_back(prompt);
        if (!same_prompts) prompts.back()[0] = sample;
      }
    }
    std::vector<Continuation> alone;
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      Generator<Cpu, float> generator(subject.dev, subject.model, {1, 320, 64});
      const GenerationSettings of_prompt{settings.sampling, settings.length, settings.stop, i};
      alone.push_back(generate(generator, {prompts[i]}, of_prompt, kQuietly).front());
    }
    for (const GenerationShape& shape :
         {GenerationShape{3, 320, 64}, {4, 320, 64, 4, 300, 20}, {8, 320, 64, 8, 300, 20}}) {
      Generator<Cpu, float> generator(subject.dev, subject.model, shape);
      const auto completions = generate(generator, prompts, settings, kQuietly);
      for (std::size_t i = 0; i < prompts.size(); ++i) {
        ASSERT_EQ(completions[i].tokens, alone[i].tokens) << i;
        ASSERT_EQ(completions[i].logps, alone[i].logps) << i;
      }
    }
  }
}

// Without idle slots to take pages from, a sequence starts only when another has ended.
TEST(Generate, SequencesWaitForPages) {
  const Config c = families()[3].config;
  Subject<float> subject(c);
  Generator<Cpu, float> generator(subject.dev, subject.model, {4, 300, 64, 4, 280, 20});  // 10 pages
  const auto start = [&](Index slot, std::uint64_t seed, const std::vector<Index>& idle) {
    const Tokens text = random_tokens(c, 280, seed);
    const auto known = generator.start(slot, text, 300, idle);
    if (known) generator.read({{slot, std::span(text).subspan(index(*known))}});
    return known;
  };
  for (const Index slot : {0, 1, 2}) EXPECT_EQ(start(slot, static_cast<std::uint64_t>(slot), {}), 0);
  EXPECT_EQ(start(3, 4, {}), std::nullopt) << "one page is free, and it needs 3";
  EXPECT_TRUE(generator.text(3).empty());
  EXPECT_EQ(start(3, 2, {}), 279) << "it needs one page beside those of slot 2";
  EXPECT_EQ(start(3, 4, {3, 1, 0}), 0) << "takes the pages of an idle sequence";
  EXPECT_TRUE(generator.text(1).empty());
  EXPECT_EQ(generator.text(0).size(), 280u) << "and no more than it needs";
}

TEST(Generate, StopsWhenTheCacheIsFull) {
  const Config c = families()[3].config;
  Subject<float> subject(c);
  Generator<Cpu, float> generator(subject.dev, subject.model, {2, 12, 16});
  const auto text = generate(generator, {random_tokens(c, 10, 1)}, {{}, 100, {}}, kQuietly);
  EXPECT_EQ(text.front().end, Ending::room);
  EXPECT_EQ(text.front().tokens.size(), 3u) << "two fit into the cache, and one is sampled after them";
  const Tokens longer = random_tokens(c, 13, 1), outside = {0, static_cast<std::int32_t>(c.vocab)};
  EXPECT_THROW(generator.read({{1, longer}}), Error);
  EXPECT_THROW(generator.read({{1, outside}}), Error);
  EXPECT_THROW(generator.read({{1, Tokens{}}}), Error);
  const Config learned = families()[0].config;
  Subject<float> gpt2(learned);
  EXPECT_NO_THROW((Generator<Cpu, float>(gpt2.dev, gpt2.model, {1, learned.max_length, 16})));
  EXPECT_THROW((Generator<Cpu, float>(gpt2.dev, gpt2.model, {1, learned.max_length + 1, 16})), Error);
}

TEST(Generate, ReportsNanLogits) {
  const Config c = families()[3].config;
  Subject<float> subject(c);
  subject.model.weights.norm.weight(0, 0) = std::nanf("");
  Generator<Cpu, float> generator(subject.dev, subject.model, {1, 12, 16});
  EXPECT_ERROR(generate(generator, {Tokens(2, 1)}, GenerationSettings({}, 3, {}), kQuietly),
               "prompt 1: the logit of token 0 after position 2 is nan");
}

// Calls use(generator) with exactly the planned memory, and returns whether all of it was needed.
template <class F>
bool needs_planned_memory(const Config& c, const GenerationShape& shape, F&& use) {
  Plan plan;
  Model<float> planned{c, Tensors<float>(c)};
  allocate(plan, table(c, planned.weights), Kind::weights);
  Generator<Plan, float>(plan, planned, shape).plan();
  Cpu dev(plan.arena.peak());
  Model<float> model{c, Tensors<float>(c)};
  allocate(dev, table(c, model.weights), Kind::weights);
  initialise(dev, model, 1);
  Generator<Cpu, float> generator(dev, model, shape);
  use(generator);
  return dev.arena.peak() == plan.arena.peak();
}

TEST(Generate, PlannedMemoryIsThePeakOfTheArena) {
  for (const Family& family : walked_families()) {
    for (const GenerationShape& shape : {GenerationShape{1, 50, 512}, {3, 100, 64}, {5, 20, 64}}) {
      const auto use = [&](Generator<Cpu, float>& generator) {
        std::vector<Tokens> prompts(index(2 * shape.slots), random_tokens(family.config, shape.room - 3, 1));
        for (Tokens& prompt : prompts) prompt[0] = static_cast<std::int32_t>(&prompt - prompts.data());
        generate(generator, prompts, {{}, 2, {}}, kQuietly);
        std::vector<Generator<Cpu, float>::Reading> readings;
        const Tokens longest = random_tokens(family.config, shape.room, 2);
        for (Index slot = 0; slot < shape.slots; ++slot) {
          generator.start(slot, Tokens{}, shape.room, {});
          readings.push_back({slot, longest});
        }
        generator.read(readings);
      };
      EXPECT_TRUE(needs_planned_memory(family.config, shape, use)) << family.name << ", " << shape.slots << " slots";
    }
  }
}

TEST(Generate, SharedPagesFitThePlannedMemory) {
  const Config c = families()[3].config;
  EXPECT_NO_THROW(needs_planned_memory(c, {4, 300, 64, 4, 257, 43}, [&](Generator<Cpu, float>& generator) {
    const std::vector<Tokens> prompts(6, random_tokens(c, 257, 1));
    generate(generator, prompts, {{}, 43, {}}, kQuietly);
  }));
}

}  // namespace
}  // namespace streambp
