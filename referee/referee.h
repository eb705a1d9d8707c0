// Judges a gradient that another trainer recorded: compares it with ours in float64, computes what rounding explains on
// this very batch, and if that is not enough, looks for the defect whose gradient it is (defects.h).
#pragma once

#include "referee/comparison.h"
#include "referee/factors.h"
#include "referee/recorded_gradient.h"

#include <numeric>
#include <span>

namespace streambp {

class Referee {
 public:
  // exact: the type of the exact gradient
  Referee(TrainingCase correct, DType exact, const RecordedGradient& recorded, CaseGradients& gradients)
      : correct_(std::move(correct)), types_{exact}, recorded_(recorded), gradients_(gradients) {
    for (const Parameter& p : trained_parameters(correct_.config)) {
      if (!recorded.tensors().contains(p.name)) continue;
      if (p.part == 0) order_.insert(order_.begin(), p.name);
      parts_[p.name].push_back(p);
    }
  }

  // The names of the compared tensors, in the order of backward: from the head to the embedding.
  const std::vector<std::string>& order() const { return order_; }
  const std::vector<Rounding>& roundings() const { return roundings_; }
  const Products& products(const std::string& name) const { return products_.at(name); }
  const Config& config() const { return correct_.config; }
  Index micro_batches() const { return std::ssize(correct_.step.batches); }
  const Parameter& parameter(const std::string& name) const { return parts_.at(name).front(); }
  // The error of a type in these tensors, as a part of their norm.
  double rounding(const std::vector<std::string>& names, std::size_t type) const {
    double error = 0, exact = 0;
    for (const std::string& name : names) {
      const double e = roundings_[type].error.at(name);
      error += e * e, exact += products_.at(name).ours;
    }
    return exact > 0 ? std::sqrt(error / exact) : error > 0 ? INFINITY : 0;
  }

  // How far the recorded gradient is from the exact one.
  void compare(CaseGradients::Result exact) {
    exact_ = by_name(std::move(exact));
    for (const std::string& name : order_) {
      const std::vector<double> theirs = recorded_.values(parts_.at(name)), &ours = exact_.at(name);
      products_[name] = {theirs, ours};
      if (of_experts(name)) experts_.insert({name, {parts_.at(name), correct_.config.experts, theirs, ours}});
    }
  }

  // The error of these types. Call with the narrowest last. For the type of the exact gradient, it is computed once more
  // with a loss three times as large, which is rounded differently.
  void compute_rounding(const Types& types) {
    const double scale = types.dtype == types_.dtype ? 3 : 1;
    Gradient rounded = by_name(gradients_.compute(correct_, types, {}, scale));
    const bool narrow = types.dtype == DType::bf16;
    Rounding rounding{types.name(), narrow && !types.wide_gradient, narrow ? kAllowedNarrow : 16.0, {}};
    std::vector<double> relative;
    for (const std::string& name : order_) {
      for (double& x : rounded.at(name)) x /= scale;
      const Products p(rounded.at(name), exact_.at(name));
      rounding.error[name] = std::sqrt(p.difference);
      if (p.ours > 0) relative.push_back(std::sqrt(p.difference / p.ours));
    }
    // A tensor of few numbers can be right by luck, so its error counts at least as much as the median tensor's.
    std::ranges::sort(relative);
    const double usual = relative.empty() ? 0 : relative[relative.size() / 2];
    for (auto& [name, error] : rounding.error) error = std::max(error, usual * std::sqrt(products_.at(name).ours));
    roundings_.push_back(rounding);
    allow_lost_decay(correct_.config, roundings_.front().error, roundings_.back().error);
  }

  // Frees the exact gradient, except of a tied embedding, before other gradients are computed.
  void finish_rounding() {
    std::erase_if(exact_,
                  [&](const auto& tensor) { return tensor.first != parameters_of(correct_.config).front().name; });
  }

  // The first type whose rounding explains a distance from `factor` times these tensors; roundings().size(): none does.
  std::size_t explained_by(const std::vector<std::string>& names, double distance) const {
    std::size_t type = 0;
    while (type < roundings_.size() && !(distance <= limit(names, type))) ++type;
    return type;
  }
  std::size_t explained_by(const std::string& name) const {
    return explained_by({name}, products_.at(name).distance());
  }
  // The type that explains all tensors.
  std::size_t explained() const {
    std::size_t type = 0;
    for (const std::string& name : order_) type = std::max(type, explained_by(name));
    return type;
  }

  // Whether the type that explains all tensors leaves too much to rounding to call the gradient right.
  bool undecided() const {
    Products all;
    bool lost = false;
    for (const std::string& name : order_) {
      const Products& p = products_.at(name);
      all += p;
      lost = lost || (roundings_[explained_by(name)].of_sums && p.distance() > kMostRounding);
    }
    return lost || std::abs(all.best_factor() - 1) > kMostRounding || all.distance() > 2 * kMostRounding;
  }
  // So many micro-batches can be added in bfloat16. Each sum loses at most 2⁻⁹.
  static constexpr Index most_sums() { return static_cast<Index>(kMostRounding / kAllowedNarrow * 512); }

  // The experts that have no gradient in this tensor, but should, if the others are right.
  std::set<Index> still_experts(const std::string& name) const {
    const auto found = experts_.find(name);
    const double limit = roundings_.back().allowed * roundings_.back().error.at(name);
    if (found == experts_.end() || !(std::sqrt(found->second.difference) <= limit)) return {};
    return found->second.still;
  }
  bool is_zero(const std::string& name) const { return products_.at(name).theirs == 0 || !still_experts(name).empty(); }

  // Tensors that are this multiple of ours, if all others are right: 0 where a gradient is missing, if only of an expert.
  struct Multiple {
    double factor = 1;
    std::vector<std::string> names;
  };
  std::optional<Multiple> multiple() const {
    Multiple found;
    bool some_right = false;
    for (const std::string& name : order_) {
      const Products& p = products_.at(name);
      const bool right = explained_by(name) < roundings_.size();
      some_right = some_right || (right && p.ours > 0);
      if (right) continue;
      const double factor = is_zero(name) ? 0 : p.best_factor();
      const double limit = this->limit({name}, roundings_.size() - 1);
      const double whole = std::round(factor);
      if (found.names.empty()) found.factor = std::abs(factor - whole) <= limit ? whole : factor;
      if (found.factor == 0 ? !is_zero(name) : p.distance(found.factor) > limit) return {};
      found.names.push_back(name);
    }
    if (found.names.empty() || !some_right) return {};
    return found;
  }

  // The tensor in which a gradient first goes wrong, in the order of backward.
  const std::string& first_wrong() const {
    return *std::ranges::find_if(order_, [&](const std::string& n) { return explained_by(n) == roundings_.size(); });
  }
  // The least and the largest factor, if every tensor is right up to one and the factors differ.
  std::optional<std::pair<double, double>> factors_of_tensors() const {
    double least = INFINITY, most = -INFINITY;
    for (const std::string& name : order_) {
      const Products& p = products_.at(name);
      const double factor = p.best_factor();
      if (p.ours == 0 || !(p.distance(factor) <= limit({name}, roundings_.size() - 1))) return {};
      least = std::min(least, factor), most = std::max(most, factor);
    }
    if (!(least > 0 && most > 1.2 * least) || order_.size() < 3) return {};
    return std::pair(least, most);
  }

  // A tied embedding's gradient is a sum of two: the head's part is dense, and the embedding's has rows of the tokens that
  // the step reads. Which of them is wrong, if everything else is right?
  enum class TiedPart { none, head, embedding };
  TiedPart wrong_tied_part() const {
    const std::string embedding = parameters_of(correct_.config).front().name;
    const bool only_this = std::ranges::all_of(order_, [&](const std::string& name) {
      return (name == embedding) == (explained_by(name) == roundings_.size());
    });
    if (!correct_.config.tied || !parts_.contains(embedding) || !only_this) return TiedPart::none;
    std::vector<bool> read(static_cast<std::size_t>(correct_.config.vocab));
    for (const RecordedBatch& b : correct_.step.batches)
      for (const std::int32_t token : b.batch.tokens) read[static_cast<std::size_t>(token)] = true;
    const std::vector<double> theirs = recorded_.values(parts_.at(embedding)), &ours = exact_.at(embedding);
    Products unread;  // rows to which only the head adds
    const auto width = static_cast<std::size_t>(correct_.config.hidden);
    for (std::size_t token = 0; token < read.size(); ++token) {
      if (read[token]) continue;
      const auto row = [&](std::span<const double> all) { return all.subspan(token * width, width); };
      unread += Products(row(theirs), row(ours));
    }
    if (unread.ours == 0) return TiedPart::none;
    if (unread.theirs == 0) return TiedPart::head;
    return unread.distance() <= limit({embedding}, roundings_.size() - 1) ? TiedPart::embedding : TiedPart::none;
  }

  // What explains the recorded gradient, the best first, then its equals. on_try gets what is tried; false ends the search.
  using OnTry = std::function<bool(const std::string& defects, bool found)>;
  std::vector<Explanation> explain(const OnTry& on_try) {
    std::vector<Explanation> found;
    bool goes_on = true;
    const auto test = [&](std::vector<const Defect*> defects, bool by_oracle = false) {
      TrainingCase c = correct_;
      std::string name;
      for (const Defect* defect : defects) {
        if (!defect->apply(c)) return;
        name += (name.empty() ? "" : " and ") + std::string(defect->name);
      }
      const bool solved = std::ranges::any_of(defects, [](const Defect* d) { return d->solved.has_value(); });
      if (c.needs_oracle() != by_oracle || (solved && defects.size() > 1)) return;
      if (!solved && !(goes_on = on_try(name, !found.empty()))) return;
      const auto in_time = [&] { return goes_on = on_try(name, !found.empty()); };
      auto explanation = solved ? solve(*defects[0], c, in_time) : matches(c, std::move(defects));
      if (explanation) found.push_back(*explanation);
    };
    const std::vector<Defect>& all = all_defects();
    const auto named = [&] { return std::ranges::any_of(found, &Explanation::named); };
    test({});
    if (!found.empty() && found.front().factor == 0) return found;
    for (std::size_t i = 0; i < all.size() && goes_on; ++i) test({&all[i]});
    const bool single = named();
    for (std::size_t i = 0; i < all.size() && goes_on && !single; ++i)
      for (std::size_t j = i + 1; j < all.size() && goes_on; ++j) test({&all[i], &all[j]});
    for (std::size_t i = 0; i < all.size() && goes_on && !named(); ++i) test({&all[i]}, true);
    if (found.empty() && partly_.leading > 1) found.push_back(partly_);
    return best(std::move(found));
  }

  // The same for a gradient that the rounding of a narrow type explains: a factor, or a mean over other parts, may explain
  // it up to a smaller rounding; one without a meaning must up to the smallest. Other defects are not tried.
  std::vector<Explanation> explain_better() {
    std::vector<Explanation> found;
    if (explained() == 0) return found;
    const auto test = [&](const TrainingCase& c, std::vector<const Defect*> defects) {
      const auto explanation = matches(c, std::move(defects));
      if (!explanation || explanation->rounding >= explained()) return;
      if (explanation->named() || explanation->rounding == 0) found.push_back(*explanation);
    };
    test(correct_, {});
    for (const Defect& defect : all_defects()) {
      TrainingCase c = correct_;
      if (defect.apply(c) && c.mean != MeanOver::step) test(c, {&defect});
    }
    return best(std::move(found));
  }

 private:
  static constexpr double kAllowedNarrow = 4;  // times our error in bfloat16

  double limit(const std::vector<std::string>& names, std::size_t type) const {
    return roundings_[type].allowed * rounding(names, type);
  }

  // The strength of a defect follows from the first tensor that it changes. Looks for it in every place that can change
  // the first wrong tensor.
  std::optional<Explanation> solve(const Defect& defect, TrainingCase c, const std::function<bool()>& in_time) {
    for (const Index place : places_of(*defect.solved)) {
      if (!in_time()) break;
      const bool chunks = defect.solved == Where::chunks, windows = defect.solved == Where::windows,
                 ranks = defect.solved == Where::expert_ranks, batches = defect.solved == Where::micro_batches;
      (batches ? c.scaled : chunks ? c.wrong.chunk : ranks ? c.wrong.expert_ranks : c.wrong.layer) = place;
      if (windows) c.wrong = {}, c.config.window = place;
      c.wrong.strength = 1;
      const double solved = windows || chunks || ranks ? 1 : strength_of(c);
      std::vector<double> strengths = {std::copysign(rounded_limit(std::abs(solved)), solved)};
      if (strengths[0] != solved) strengths.push_back(solved);
      for (const double strength : strengths) {
        c.wrong.strength = strength;
        auto found = solved == 0 ? std::nullopt : matches(c, {&defect});
        if (!found) continue;
        const std::string where = std::to_string(place);
        found->detail =
            windows         ? ", of " + where + " tokens"
            : chunks        ? ", every " + where + " rows"
            : ranks         ? ", with experts on " + where + " ranks"
            : c.scaled >= 0 ? ", micro-batch " + where + " " + shown_number(1 + strength) + " times"
            : defect.solved == Where::everywhere
                ? ", of strength " + shown_number(strength)
                : ", times " + shown_number(1 - strength) + (place < 0 ? ", in all layers" : ", in layer " + where);
        return found;
      }
    }
    return {};
  }

  std::vector<Index> places_of(Where where) const {
    const Index layer = layer_of(first_wrong()), layers = correct_.config.layers, longest = correct_.step.longest();
    Index first = -1, last = -1;
    if (where == Where::micro_batches) first = 0, last = micro_batches() - 1;
    if (where == Where::windows) first = 1, last = longest - 1;
    if (where == Where::expert_ranks) first = 2, last = correct_.config.experts;
    std::vector<Index> places(static_cast<std::size_t>(std::max(last - first + 1, Index{0})));
    std::iota(places.begin(), places.end(), first);
    if (where == Where::expert_ranks)
      std::erase_if(places, [&](Index ranks) { return correct_.config.experts % ranks != 0; });
    if (where == Where::layers)
      for (Index l = layer; l <= std::min(layer + 1, layers - 1); ++l) places.push_back(l);
    if (where == Where::chunks) {  // the rows of one of 2, 4 or 8 ranks, or a power of two
      places = {(longest + 1) / 2, (longest + 3) / 4, (longest + 7) / 8};
      for (Index n = 16; n < longest; n *= 2) places.push_back(n);
    }
    return places;
  }

  // Least squares of theirs - right = strength (wrong - right) in the first tensor that differs; 0: theirs is right there.
  double strength_of(const TrainingCase& c) {
    const std::set<std::string> only = c.scaled >= 0 ? head_vectors() : std::set<std::string>();
    Gradient& right = right_[c.scaled >= 0];
    if (right.empty()) right = by_name(gradients_.compute(correct_, {DType::f32}, only));
    const Gradient wrong = by_name(gradients_.compute(c, {DType::f32}, only));
    for (const std::string& name : order_) {
      if (!wrong.contains(name) || Products(wrong.at(name), right.at(name)).distance() <= limit({name}, 0)) continue;
      const std::vector<double> theirs = recorded_.values(parts_.at(name));
      double both = 0, change = 0;
      for (std::size_t i = 0; i < theirs.size(); ++i) {
        const double d = wrong.at(name)[i] - right.at(name)[i];
        both += (theirs[i] - right.at(name)[i]) * d, change += d * d;
      }
      return explained_by(name) == 0 ? 0 : both / change;
    }
    return 0;
  }

  Index layer_of(const std::string& name) const {
    Tensors<float> none(correct_.config);
    for (Index l = 0; l < correct_.config.layers; ++l)
      for (const auto& e : layer_table(correct_.config, l, none.layers[static_cast<std::size_t>(l)]))
        if (e.parameter.name == name) return l;
    return parameter(name).name == parameters_of(correct_.config).front().name ? 0 : correct_.config.layers - 1;
  }

  // Whether the recorded gradient is that of a case, perhaps times a factor. Looks at the last norm first: any defect of
  // the loss or of forward changes its gradient, which needs no backward pass through the layers. float32 is enough for
  // the search: its error is smaller than what a trainer in float32 is allowed.
  std::optional<Explanation> matches(const TrainingCase& c, std::vector<const Defect*> defects) {
    const std::set<std::string> first = head_vectors();
    if (c.wrong.layer < 0 && !first.empty() && !test(c, first, defects)) return {};
    return test(c, {}, std::move(defects));
  }
  std::set<std::string> head_vectors() const {
    std::set<std::string> first;
    Tensors<float> none(correct_.config);
    for (const auto& e : head_table(correct_.config, none))
      if (e.parameter.vector() && parts_.contains(e.parameter.name)) first.insert(e.parameter.name);
    return first;
  }

  // The best factor for these tensors, or for all of them.
  std::optional<Explanation> test(const TrainingCase& c, const std::set<std::string>& only,
                                  std::vector<const Defect*> defects) {
    const Gradient ours = by_name(gradients_.compute(c, {DType::f32}, only));
    std::map<std::string, Products> tensors;
    Products sum;
    for (const auto& [name, values] : ours) {
      if (!parts_.contains(name) || !(only.empty() || only.contains(name))) continue;
      sum += tensors[name] = Products(recorded_.values(parts_.at(name)), values);
    }
    std::optional<Explanation> result;
    const auto test = [&](double factor, const std::string& meaning, bool clipped = false) {
      Explanation e{defects, factor, meaning, sum.distance(factor)};
      e.clipped = clipped;
      std::size_t leading = 0;
      for (const std::string& name : order_) {
        if (!tensors.contains(name)) continue;
        const std::size_t type = explained_by({name}, tensors.at(name).distance(factor));
        leading += e.rounding < roundings_.size() && type < roundings_.size();
        e.rounding = std::max(e.rounding, type);
      }
      if (e.rounding < (result ? result->rounding : roundings_.size())) result = e;
      if (!only.empty() || explained_by(order_.front()) < roundings_.size() || !e.named() || leading <= partly_.leading)
        return;
      partly_ = e, partly_.leading = leading, partly_.rounding = roundings_.size() - 1;
    };
    test(1, "");
    for (const Factor& f : factors(c.step)) test(f.value, f.meaning);
    if (only.empty() && recorded_.missing().empty() && 0 < sum.theirs && sum.theirs < sum.ours) {
      const double norm = std::sqrt(sum.theirs), limit = rounded_limit(norm);
      const bool clipped = std::abs(norm / limit - 1) < 1e-5;
      if (clipped) test(sum.best_factor(), "it is clipped to a norm of " + shown_number(limit), clipped);
    }
    test(sum.best_factor(), sum.theirs == 0 ? "it is zero" : "");
    return result;
  }

  std::vector<Factor> factors(const RecordedStep& step) const {
    std::vector<Factor> all = factors_of(step);
    const auto whole = static_cast<double>(correct_.step.targets()), kept = static_cast<double>(step.targets());
    if (kept != whole) all.push_back({kept / whole, "it is divided by all learned tokens of the step"});
    return all;
  }

  TrainingCase correct_;
  Types types_;
  const RecordedGradient& recorded_;
  CaseGradients& gradients_;
  std::vector<std::string> order_;
  std::map<std::string, std::vector<Parameter>> parts_;
  Gradient exact_;
  std::map<std::string, Products> products_;
  std::map<std::string, ExpertParts> experts_;
  std::vector<Rounding> roundings_;
  std::map<bool, Gradient> right_;  // in float32, all of it or of the last norm
  Explanation partly_;              // the best that explains only the first tensors
};

}  // namespace streambp
