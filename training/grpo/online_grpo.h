// On-line GRPO. In each round the model samples a group of completions per prompt, the completions are rewarded, and
// one or more optimizer steps use the advantage of each completion over its group.
#pragma once

#include "data/documents/text.h"
#include "data/files/checkpoint.h"
#include "parallel/processes.h"
#include "training/batch_source.h"
#include "training/grpo/rewards.h"
#include "training/grpo/rollouts.h"

namespace streambp {

class OnlineGrpo : public BatchSource {
 public:
  struct Data {
    std::vector<std::string> files, held_out_files;  // of prompts
    ChatOptions chat;
    double held_out = 0;  // fraction of the prompts
    std::uint64_t seed = 1;
  };

  // model: provides the tokenizer. reference: the reference model of --kl.
  OnlineGrpo(const GrpoSettings& settings, const Data& data, const fs::path& model, const fs::path& reference)
      : settings_(settings), reference_(reference), seed_(data.seed), prompter_(model, data.chat), rewarder_(settings) {
    std::uint64_t hash = 0;
    const auto add = [&](Prompt& prompt, bool is_held_out) {
      const auto number = static_cast<std::uint64_t>(training_.size() + held_out_.size());
      hash ^= mix(number ^ text_hash(text_of(prompt.line)));
      longest_ = std::max(longest_, static_cast<Index>(prompt.tokens.size()));
      (is_held_out ? held_out_ : training_).push_back(std::move(prompt));
    };
    const double held_out = data.held_out_files.empty() ? data.held_out : 0;
    for (Index i = 0; Prompt & prompt : read_prompts(data.files, prompter_, settings))
      add(prompt, Random(data.seed, 0xe7a1).uniform(static_cast<std::uint64_t>(i++)) < held_out);
    if (!data.held_out_files.empty()) {
      evaluated_ = SIZE_MAX;
      for (Prompt& prompt : read_prompts(data.held_out_files, prompter_, settings)) add(prompt, true);
    }
    if (training_.empty()) std::swap(training_, held_out_);
    fingerprint = std::to_string(hash);
  }

  std::string fingerprint;  // of the prompts
  Index parallel = 1;       // completions sampled at once
  Index micro_batches = 1;  // of a round, at least

  Index prompts() const { return static_cast<Index>(training_.size()); }
  Index completions() const { return settings_.completions(); }     // of a round
  Index completion() const { return settings_.completion; }         // maximum tokens of one
  void set_completion(Index most) { settings_.completion = most; }  // before the first round
  Index longest_prompt() const { return longest_; }
  Index longest() const { return longest_ + settings_.completion; }  // prompt and completion
  GenerationShape shape(Index parallel) const {
    return {.slots = parallel,
            .room = longest(),
            .samples = settings_.group,
            .prompt = longest_,
            .completion = settings_.completion};
  }
  Index steps_per_epoch() const { return ceil_div(prompts(), settings_.prompts) * settings_.inner; }
  bool begins_round(Index step) const { return (step - 1) % settings_.inner == 0; }

  const std::vector<Batch>& batches(const Trainee& trainee, Index step) override {
    if (begins_round(step)) sample(trainee, (step - 1) / settings_.inner);
    step_logps_.resize(batches_.size());
    return batches_;
  }

  Engine::OnLogps on_logps() override {
    return [this](std::size_t i, const std::vector<double>& logps) { step_logps_[i] = logps; };
  }

  void learned(Index step, Measures& measures) override {
    if (begins_round(step)) {
      logps_ = by_completion(step_logps_);
      round_["sampling_difference"] = sampling_difference();
      for (std::size_t i = 0; i < batches_.size() && settings_.inner > 1; ++i) batches_[i].old = step_logps_[i];
    }
    measures.others["entropy"] = entropy();
    for (const auto& [name, value] : round_) measures.others[name] = value;
    // The rewards that the weights were trained with may belong to other completions.
    on_each_rank([&] {
      rewarder_.check_quiet();
      if (begins_round(step) && this_process().rank == 0) record(step);
    });
  }

  // The mean reward of greedy completions of held-out prompts.
  Evaluation evaluate(const Trainee& trainee) override {
    std::vector<const Prompt*> asked;
    for (std::size_t i = 0; i < std::min(evaluated_, held_out_.size()); ++i) asked.push_back(&held_out_[i]);
    if (asked.empty()) return {};
    return {.reward = mean_reward(complete(trainee.engine, asked, {.temperature = 0})), .empty = false};
  }
  bool evaluates_first() const override { return true; }  // it asks the reward program, which finish() ends

  // Checks what the reward program still writes until it ends.
  void finish(double seconds) override {
    on_each_rank([&] { rewarder_.finish(seconds); });
  }
  void finish_after_error(const Trainee&) override { finish(ShellProgram::kMoment); }

  // The file for the groups of every round; off-line training can read it.
  void record_in(const fs::path& path) {
    record_path_ = path;
    if (this_process().rank == 0) record_.open(path, std::ios::app);
  }

  // Writes the groups of the round that begins with this step, which has computed their log-probs.
  void record(Index step) {
    for (std::size_t i = 0; i < samples_.size(); i += index(settings_.group)) {
      const Json& line = samples_[i].prompt->line;
      Json group = {{"step", step}, {"prompt", line[line.contains("messages") ? "messages" : "prompt"]}};
      for (std::size_t j = i; j < i + index(settings_.group); ++j) {
        group["texts"].push_back(samples_[j].text);
        group["completions"].push_back(samples_[j].tokens);
        group["rewards"].push_back(samples_[j].reward);
        group["old_logps"].push_back(logps_[j]);
      }
      record_ << text_of(group) << "\n";
    }
    record_.flush();
    require(record_.good(), record_path_.string(), ": cannot write: ", std::strerror(errno));
  }

 private:
  struct Sample : Continuation {
    const Prompt* prompt;
    std::string text;
    double reward = 0;
  };

  // Prompt n of the run, counted over all epochs. Every epoch has its own order.
  const Prompt& prompt(Index n) {
    const Index epoch = n / prompts();
    if (epoch != epoch_) order_ = shuffled(training_.size(), Random(seed_, mix(static_cast<std::uint64_t>(epoch))));
    epoch_ = epoch;
    return training_[index(order_[index(n % prompts())])];
  }

  // A completion for each of these prompts. Every rank samples some of them and gets all.
  std::vector<Continuation> completions_of(Engine& engine, const std::vector<const Prompt*>& asked,
                                           const Sampling& sampling) {
    const Process& process = this_process();
    const Rows mine = shard(static_cast<Index>(asked.size()), {process.rank, process.count});
    std::vector<Tokens> begun;
    for (Index i = mine.begin; i < mine.end; ++i) begun.push_back(asked[index(i)]->tokens);
    const GenerationSettings settings = {sampling, settings_.completion, prompter_.stop, index(mine.begin)};
    auto generator = engine.generator(shape(parallel));
    std::vector<double> sampled;  // of each completion: its ending, its number of tokens, tokens and log-probs
    for (const Continuation& c : generator->generate(begun, settings, [](std::size_t, const Continuation&) {})) {
      sampled.insert(sampled.end(), {static_cast<double>(c.end), static_cast<double>(c.tokens.size())});
      sampled.insert(sampled.end(), c.tokens.begin(), c.tokens.end());
      sampled.insert(sampled.end(), c.logps.begin(), c.logps.end());
    }
    std::vector<Continuation> all;
    for (const std::vector<double>& of_rank : gather_on_host(all_ranks(), sampled)) {
      for (auto next = of_rank.begin(); next != of_rank.end();) {
        const auto end = static_cast<Ending>(*next++);
        const auto count = static_cast<std::ptrdiff_t>(*next++);
        all.push_back({{next, next + count}, {next + count, next + 2 * count}, end});
        next += 2 * count;
      }
    }
    return all;
  }

  // Samples and rewards one completion for each of these prompts.
  std::vector<Sample> complete(Engine& engine, const std::vector<const Prompt*>& asked, const Sampling& sampling) {
    std::vector<Sample> samples;
    std::vector<Reasoned> texts;
    for (const Continuation& c : completions_of(engine, asked, sampling)) {
      const Prompt& prompt = *asked[samples.size()];
      const std::size_t without_stop = c.tokens.size() - (c.end == Ending::stop);
      samples.push_back({c, &prompt, prompter_.tokenizer.decode({c.tokens.data(), without_stop})});
      texts.push_back(prompter_.reasoned(prompt, samples.back().text));
    }
    std::vector<double> rewards;
    on_each_rank([&] {
      rewards = rewarder_.rewards(asked, texts);
      for (const double reward : rewards)
        require(is_advantage({reward, reward}), "a reward of ", reward, " is too large to compare; give smaller ones");
    });
    rewards = gather_on_host(all_ranks(), rewards)[0];
    for (std::size_t i = 0; i < samples.size(); ++i) samples[i].reward = rewards[i];
    return samples;
  }

  void sample(const Trainee& trainee, Index round) {
    std::vector<const Prompt*> asked;
    for (Index i = 0; i < completions(); ++i) asked.push_back(&prompt(round * settings_.prompts + i / settings_.group));
    samples_ = complete(trainee.engine, asked,  // the engine divides logits by the temperature
                        {.top_p = settings_.top_p,
                         .top_k = settings_.top_k,
                         .seed = mix(seed_ ^ mix(static_cast<std::uint64_t>(round) + 0x9290))});
    std::vector<Rollout> rollouts;
    for (auto group = samples_.begin(); group != samples_.end(); group += settings_.group) {
      std::vector<double> rewards;
      for (Index i = 0; i < settings_.group; ++i) rewards.push_back(group[i].reward);
      const std::vector<double> better =
          advantages(rewards, trainee.settings.objective.scale_rewards ? Scaled::yes : Scaled::no);
      for (Index i = 0; i < settings_.group; ++i) {
        Rollout rollout{group[i].prompt->tokens, static_cast<Index>(group[i].prompt->tokens.size()), better[index(i)]};
        rollout.tokens.insert(rollout.tokens.end(), group[i].tokens.begin(), group[i].tokens.end());
        rollouts.push_back(std::move(rollout));
      }
    }
    batches_ = batches_of(rollouts, trainee.rows, micro_batches, layout_of(trainee.settings.config));
    if (trainee.settings.objective.kl > 0) compute_reference_logps(trainee);
    describe(rollouts);
  }

  // Computes the reference log-probs of the round. Meanwhile the reference model replaces the trained one on the
  // device.
  void compute_reference_logps(const Trainee& trainee) {
    trainee.engine.with_weights_of(reference_, [&] {
      const std::vector<std::vector<double>> logps = trainee.engine.evaluate(batches_, trainee.schedule);
      for (std::size_t i = 0; i < batches_.size(); ++i) batches_[i].reference = logps[i];
    });
  }

  // Log-probs per token of the batches become log-probs per token of each completion.
  std::vector<std::vector<double>> by_completion(const std::vector<std::vector<double>>& logps) const {
    std::vector<std::vector<double>> result;
    for (std::size_t i = 0; i < batches_.size(); ++i) {
      for (const Rows rows : batches_[i].documents()) {
        result.emplace_back();
        for_each_target(batches_[i], rows, [&](std::size_t t) { result.back().push_back(logps[i][t]); });
      }
    }
    return result;
  }

  // Of the step, per token.
  double entropy() const {
    Counts counts;
    double sum = 0;
    for (const Batch& batch : batches_) counts += Counts(batch);
    for (const std::vector<double>& logps : step_logps_)
      for (const double logp : logps) sum -= logp;
    return sum / static_cast<double>(counts.targets);
  }

  // The largest difference between log-probs in sampling and in the round's first step. On a CPU it is 0.
  double sampling_difference() const {
    double largest = 0;
    for (std::size_t i = 0; i < samples_.size(); ++i) {
      for (std::size_t t = 0; t < logps_[i].size(); ++t) {
        largest = std::max(largest, std::abs(logps_[i][t] - samples_[i].logps[t]));
      }
    }
    return largest;
  }

  template <class T, class F>
  static double mean(const std::vector<T>& all, F&& f) {
    double sum = 0;
    for (const T& one : all) sum += static_cast<double>(f(one));
    return sum / static_cast<double>(all.size());
  }
  static double mean_reward(const std::vector<Sample>& samples) {
    return mean(samples, [](const Sample& s) { return s.reward; });
  }

  void describe(const std::vector<Rollout>& rollouts) {
    const double reward = mean_reward(samples_);
    const auto square = [&](const Sample& s) { return (s.reward - reward) * (s.reward - reward); };
    round_ = {{"reward", reward},
              {"reward_deviation", std::sqrt(mean(samples_, square))},
              {"length", mean(samples_, [](const Sample& s) { return s.tokens.size(); })},
              {"stopped", mean(samples_, [](const Sample& s) { return s.end == Ending::stop; })},
              {"without_advantage", mean(rollouts, [](const Rollout& r) { return r.advantage == 0; })}};
  }

  GrpoSettings settings_;
  const fs::path reference_;
  const std::uint64_t seed_;
  Prompter prompter_;
  Rewarder rewarder_;
  std::vector<Prompt> training_, held_out_;
  std::size_t evaluated_ = 256;  // held-out prompts, at most
  std::vector<Index> order_;     // of the prompts in the epoch
  Index longest_ = 0, epoch_ = -1;
  std::vector<Sample> samples_;                  // of the round, group by group
  std::vector<Batch> batches_;                   // of the round
  std::vector<std::vector<double>> step_logps_;  // of the batches, in the last step
  std::vector<std::vector<double>> logps_;       // of the samples, in the round's first step
  std::map<std::string, double> round_;
  std::ofstream record_;
  fs::path record_path_;
};

}  // namespace streambp
