// On-line GRPO as the training loop sees it. In a round the model completes some prompts several times each; its
// completions are rewarded, and for one or several optimizer steps it learns from how each compares with its group.
#pragma once

#include "../data/checkpoint.cuh"
#include "../rollouts.cuh"
#include "../trainer.cuh"
#include "group_options.cuh"

namespace streambp {

class Groups {
 public:
  // `start`: the model whose distance --kl keeps small.
  Groups(const GroupOptions& options, const std::vector<std::string>& files, const fs::path& model,
         const std::string& layout, const fs::path& start, double held_out, std::uint64_t seed)
      : options_(options), start_(start), seed_(seed), prompter_(model, layout), rewarder_(options) {
    std::uint64_t hash = 0;
    for (Prompt& prompt : read_prompts(files, prompter_, !options.reward.empty())) {
      const auto number = static_cast<std::uint64_t>(training_.size() + held_out_.size());
      hash ^= mix(number ^ text_hash(prompt.line.dump(-1, ' ', false, Json::error_handler_t::replace)));
      longest_ = std::max(longest_, static_cast<Index>(prompt.tokens.size()));
      (Random(seed, 0xe7a1).uniform(number) < held_out ? held_out_ : training_).push_back(std::move(prompt));
    }
    if (training_.empty()) std::swap(training_, held_out_);
    fingerprint = std::to_string(hash);
  }

  std::string fingerprint;  // of the prompts
  Index slots = 1;          // completions that grow at once
  Index prompts() const { return static_cast<Index>(training_.size()); }
  Index completions() const { return options_.prompts * options_.size; }  // of a round
  Index longest() const { return longest_ + options_.completion; }        // prompt and completion
  Index steps_per_epoch() const { return ceil_div(prompts(), options_.prompts) * options_.inner; }
  bool begins_round(Index step) const { return (step - 1) % options_.inner == 0; }

  template <class Device, class T, class G, class M>
  StepResult step(Trainer<Device, T, G, M>& trainer, const Schedule& schedule, Index rows,
                  const OptimizerSettings& optimizer, Index step) {
    const bool begins = begins_round(step);
    if (begins) sample(trainer, schedule, rows, (step - 1) / options_.inner);
    double surprise = 0;
    StepResult result = trainer.step(batches, schedule, optimizer, step, [&](std::size_t i, const auto& logp) {
      if (begins && options_.inner > 1) olds_[i].assign(logp.begin(), logp.end());
      for (auto x : logp) surprise -= static_cast<double>(x);
    });
    if (begins && options_.inner > 1) {
      for (std::size_t i = 0; i < batches.size(); ++i) batches[i].old = olds_[i];
    }
    Counts counts;
    for (const Batch& batch : batches) counts += Counts(batch);
    result.measures.others["entropy"] = surprise / static_cast<double>(counts.targets);
    for (const auto& [name, value] : round_) result.measures.others[name] = value;
    return result;
  }

  // The mean reward of the likeliest completions of prompts that training never sees; none: NaN.
  template <class Device, class T, class G, class M>
  double evaluate(Trainer<Device, T, G, M>& trainer) {
    constexpr std::size_t most = 256;
    std::vector<const Prompt*> asked;
    for (std::size_t i = 0; i < std::min(most, held_out_.size()); ++i) asked.push_back(&held_out_[i]);
    if (asked.empty()) return NAN;
    const std::vector<double> rewards = reward(asked, complete(trainer, asked, {.temperature = 0}));
    return std::accumulate(rewards.begin(), rewards.end(), 0.0) / static_cast<double>(rewards.size());
  }

  std::vector<Batch> batches;  // of the round

 private:
  // Prompt n of the run, counted through all epochs, each of which has an order of its own.
  const Prompt& prompt(Index n) {
    const Index epoch = n / prompts();
    if (epoch != epoch_) order_ = shuffled(training_.size(), Random(seed_, mix(static_cast<std::uint64_t>(epoch))));
    epoch_ = epoch;
    return training_[index(order_[index(n % prompts())])];
  }

  template <class Device, class T, class G, class M>
  std::vector<Continuation> complete(Trainer<Device, T, G, M>& trainer, const std::vector<const Prompt*>& asked,
                                     const Sampling& sampling) {
    std::vector<Tokens> texts;
    for (const Prompt* prompt : asked) texts.push_back(prompt->tokens);
    Generator<Device, T> generator(trainer.dev, trainer.model, slots, longest(), kTile);
    return generate(generator, texts, {sampling, options_.completion, prompter_.stop},
                    [](std::size_t, const Continuation&) {});
  }

  std::vector<double> reward(const std::vector<const Prompt*>& asked, const std::vector<Continuation>& completions) {
    std::vector<std::string> texts;
    for (const Continuation& completion : completions) {
      const bool stopped = completion.end == Ending::stop;
      texts.push_back(prompter_.tokenizer.decode({completion.tokens.data(), completion.tokens.size() - stopped}));
    }
    return rewarder_.rewards(asked, texts);
  }

  template <class Device, class T, class G, class M>
  void sample(Trainer<Device, T, G, M>& trainer, const Schedule& schedule, Index rows, Index round) {
    std::vector<const Prompt*> asked;
    for (Index i = 0; i < completions(); ++i) asked.push_back(&prompt(round * options_.prompts + i / options_.size));
    const auto completed =
        complete(trainer, asked, {.seed = mix(seed_ ^ mix(static_cast<std::uint64_t>(round) + 0x9290))});
    const std::vector<double> rewards = reward(asked, completed);
    const std::vector<double> worth = advantages(rewards, options_.size, trainer.objective.mean != Mean::length);
    std::vector<Rollout> rollouts;
    for (std::size_t i = 0; i < asked.size(); ++i) {
      Rollout rollout{asked[i]->tokens, static_cast<Index>(asked[i]->tokens.size()), worth[i]};
      rollout.tokens.insert(rollout.tokens.end(), completed[i].tokens.begin(), completed[i].tokens.end());
      rollouts.push_back(std::move(rollout));
    }
    batches = batches_of(rollouts, rows);
    olds_.assign(batches.size(), {});
    if (trainer.objective.kl > 0) read_by_start(trainer, schedule);
    describe(rewards, worth, completed);
  }

  // What the starting model thinks of the round. It takes the place of the present one meanwhile.
  template <class Device, class T, class G, class M>
  void read_by_start(Trainer<Device, T, G, M>& trainer, const Schedule& schedule) {
    PutAside<Device, T> present(trainer.dev, trainer.model);
    load_model(trainer.dev, start_, trainer.model);
    for (Batch& batch : batches) {
      const auto logp = trainer.evaluate(batch, schedule);
      batch.reference.assign(logp.begin(), logp.end());
    }
    present.restore();
  }

  void describe(const std::vector<double>& rewards, const std::vector<double>& worth,
                const std::vector<Continuation>& completed) {
    const auto n = static_cast<double>(rewards.size());
    const double mean = std::accumulate(rewards.begin(), rewards.end(), 0.0) / n;
    double squares = 0, tokens = 0, stopped = 0;
    for (double reward : rewards) squares += (reward - mean) * (reward - mean);
    for (const Continuation& c : completed) {
      tokens += static_cast<double>(c.tokens.size());
      stopped += c.end == Ending::stop;
    }
    const auto idle = static_cast<double>(std::count(worth.begin(), worth.end(), 0.0));
    round_ = {{"reward", mean},
              {"reward_deviation", std::sqrt(squares / n)},
              {"length", tokens / n},
              {"stopped", stopped / n},
              {"without_advantage", idle / n}};
  }

  const GroupOptions options_;
  const fs::path start_;
  const std::uint64_t seed_;
  Prompter prompter_;
  Rewarder rewarder_;
  std::vector<Prompt> training_, held_out_;
  std::vector<Index> order_;  // of the prompts in the epoch
  Index longest_ = 0, epoch_ = -1;
  std::vector<std::vector<double>> olds_;  // log-probabilities of each batch before the round's first step
  std::map<std::string, double> round_;
};

}  // namespace streambp
