#include "commands/referee.h"

#include "commands/step_progress.h"

#include "commands/text.h"
#include "data/files/results.h"
#include "referee/random_documents.h"

namespace streambp {
namespace {

constexpr double kMoreMinutes = 3;  // from the start, for others that explain a gradient as well
constexpr Index kMostRows = 50;     // of the table

std::string percent(double part) {
  if (part == 0) return "0";
  return part < 0.001 ? format("%.1e", part) : format(part < 1 ? "%.2g %%" : "%.0f %%", 100 * part);
}

// Where RoPE's scaling depends on the length, transformers chooses it for each micro-batch.
void require_one_scaling(const TrainingCase& c) {
  const RopeScaling& rope = c.config.rope_scaling;
  if (!rope.depends_on_length()) return;
  std::set<Index> scalings;
  for (const RecordedBatch& b : c.step.batches) {
    const Index longest = b.batch.longest();
    const bool is_long = static_cast<double>(longest) > rope.original_length;
    scalings.insert(!is_long ? 0 : rope.type == RopeType::dynamic ? longest : 1);
  }
  require(scalings.size() == 1, "the micro-batches of the step have different RoPE scalings, because their longest ",
          "documents differ; record a step of equal lengths");
}

// "layer 3", or the name of a parameter outside the layers.
std::string section_of(const Config& config, const Parameter& p) {
  if (!p.in_layer) return p.name;
  const std::size_t begin = module_name(config, family_of(config).modules.layers).size();
  return "layer " + p.name.substr(begin, p.name.find('.', begin) - begin);
}

// What a defect does to the loss and to the gradient, from the head down to the embedding.
void show_effect(const Config& config, const CaseGradients::Result& wrong, const CaseGradients::Result& correct,
                 Json& json) {
  std::vector<std::pair<std::string, Products>> sections;
  Products all;
  for (std::size_t i = wrong.values.size(); i-- > 0;) {
    const std::string section = section_of(config, wrong.parameters[i]);
    if (sections.empty() || sections.back().first != section) sections.emplace_back(section, Products());
    const Products of_tensor(wrong.values[i], correct.values[i]);
    sections.back().second += of_tensor, all += of_tensor;
  }
  sections.emplace_back("the whole gradient", all);
  print("The correct loss is %.12g.\n\n", correct.loss);
  TextTable table({"", "distance", "cosine", "norm ratio"});
  for (const auto& [section, p] : sections) {
    table.add({section, percent(p.distance()), format("%.6f", p.cosine()), format("%.5g", p.norm_ratio())});
    json["effect"].push_back(
        {{"section", section}, {"distance", p.distance()}, {"cosine", p.cosine()}, {"norm_ratio", p.norm_ratio()}});
  }
  table.print();
}

// The verdict on a recorded gradient, printed and as JSON.
class Report {
 public:
  Report(const Config& config, Referee& referee, const RecordedGradient& recorded, Json& json)
      : config_(config), referee_(referee), recorded_(recorded), json_(json) {}

  // A row for each tensor; of a large model for each layer.
  void table() {
    const bool large = std::ssize(referee_.order()) > kMostRows;
    std::vector<std::string> header = {large ? "in the order of backward" : "tensor, in the order of backward",
                                       "distance", "cosine", "norm ratio"};
    for (const Rounding& r : referee_.roundings()) header.push_back(r.name);
    header.push_back("");
    TextTable table(header);
    std::vector<std::string> names;
    for (std::size_t i = 0; i < referee_.order().size(); ++i) {
      const std::string& name = referee_.order()[i];
      json_["tensors"].push_back(entry(name));
      names.push_back(name);
      const bool last = i + 1 == referee_.order().size();
      if (!last && large && section(name) == section(referee_.order()[i + 1])) continue;
      table.add(row(large ? section(name) : name, names));
      names.clear();
    }
    table.print();
    if (large) print("--json FILE has a row for each tensor.\n");
    list("without a recorded gradient", "missing", recorded_.missing());
    list("recorded, but of no trained parameter", "unknown", recorded_.unknown());
    print("\n");
  }

  bool is_right(const std::string& name) const { return referee_.explained_by(name) < referee_.roundings().size(); }

  void right() const {
    const Rounding& r = referee_.roundings()[referee_.explained()];
    say("Right: " + rounding(r) + " explains every difference of these " +
        counted(std::ssize(referee_.order()), "tensor") + ".");
    json_["verdict"] = "right", json_["rounding"] = r.name;
  }

  void undecided() const {
    const bool many =
        referee_.roundings()[referee_.explained()].of_sums && referee_.micro_batches() > Referee::most_sums();
    say("This step cannot decide: the distance is large, but " + rounding(referee_.roundings()[referee_.explained()]) +
        " may explain it. Record one " +
        (many ? format("of at most %ld micro-batches, or add them in float32.", Referee::most_sums())
              : "that is computed in float32."));
    json_["verdict"] = "undecided";
  }

  void clipped(const Explanation& e) const {
    say("Right, but " + e.factor_meaning + ": " + rounding(referee_.roundings()[e.rounding]) +
        " explains every difference from " + format("%.6g", e.factor) +
        " times the exact gradient. Record a step without clipping to compare the scale, too.");
    json_["verdict"] = "right", json_["clipped"] = e.factor, json_["rounding"] = referee_.roundings()[e.rounding].name;
  }

  void wrong() const {
    std::string first, worst;
    const bool some = referee_.explained() == referee_.roundings().size();
    for (const std::string& name : referee_.order()) {
      if (some && is_right(name)) continue;
      if (first.empty()) first = name;
      if (worst.empty() || referee_.products(name).distance() > referee_.products(worst).distance()) worst = name;
    }
    say("WRONG, first in " + first + ". The largest difference is " + percent(referee_.products(worst).distance()) +
        ", in " + worst + ".");
    json_["verdict"] = "wrong", json_["first"] = first, json_["worst"] = worst;
    Index all = 0, still = 0;
    for (const std::string& name : referee_.order())
      if (of_experts(name) && referee_.products(name).ours > 0) ++all, still += referee_.products(name).theirs == 0;
    if (still > 0)
      say(format("%ld of the %ld tensors of experts%s have no gradient: ", still, all,
                 config_.adapters.empty() ? "" : "' adapters") +
          (still == all ? "no expert moves." : "they do not move."));
  }

  void tied(Referee::TiedPart part) const {
    const std::string what = part == Referee::TiedPart::head ? "head" : "embedding";
    say("Explained: all other tensors are right. The tied embedding lacks the gradient of the " + what +
        ", or has a wrong one.");
    json_["explanation"] = {{"part", what}, {"tensors", {referee_.order().back()}}};
  }

  void multiple(const Referee::Multiple& m) const {
    const std::string what = m.factor == 0   ? "zero"
                             : m.factor == 2 ? "counted twice"
                                             : format("%.6g times what it should be", m.factor);
    const std::string experts = m.factor == 0 ? experts_in_words(m.names) : "";
    const std::string tensors = "the gradient of " + counted(std::ssize(m.names), "tensor") + " is " + what;
    say("Explained: all other tensors are right, and " + (experts.empty() ? tensors : experts) + " (" +
        in_words(m.names) + ").");
    json_["explanation"] = {{"factor", m.factor}, {"tensors", m.names}};
  }

  void zero(const std::string& name) const {
    const std::string experts = experts_in_words({name});
    say("Explained: " + (experts.empty() ? name + " is zero" : experts + " in " + name) +
        ", and everything before it in backward is right. Is it detached there?");
    json_["explanation"] = {{"factor", 0}, {"tensors", {name}}};
  }

  void stale() const {
    say("The gradient was not zero before the first forward pass of the step. Is zero_grad() missing?");
    json_["began_with"] = "a gradient";
  }

  void factors(double least, double most) const {
    say(format("Explained: every tensor is right up to a factor, from %.6g to %.6g. ", least, most) +
        "Are they clipped or scaled one by one?");
    json_["explanation"] = {{"least_factor", least}, {"largest_factor", most}};
  }

  void explained(const std::vector<Explanation>& found) const {
    const Explanation& best = found.front();
    if (best.leading > 0) {
      say("Explained in part: down to " + referee_.order()[best.leading - 1] + ", your gradient is that of " +
          meaning(best) + ". What is wrong below, too, is not known.");
    } else
      say("Explained: up to " + rounding(referee_.roundings()[best.rounding]) + " (" + percent(best.distance) +
          "), your gradient is that of " + meaning(best) + ".");
    Json all = Json::array();
    for (const Explanation& e : found) {
      Json names = Json::array();
      for (const Defect* d : e.defects) names.push_back(d->name);
      all.push_back({{"defects", names},
                     {"detail", e.detail},
                     {"in_part", e.leading > 0},
                     {"factor", e.factor},
                     {"factor_meaning", e.factor_meaning},
                     {"distance", e.distance},
                     {"rounding", referee_.roundings()[e.rounding].name}});
      if (&e != &best) say("This step cannot tell it from " + meaning(e) + ".");
    }
    json_["explanations"] = all;
  }

  // A sentence for the console and the results.
  void say(const std::string& sentence) const {
    print("%s\n", sentence);
    json_["said"].push_back(sentence);
  }

 private:
  static std::string rounding(const Rounding& r) { return std::string("rounding in ") + r.name; }

  static std::string meaning(const Explanation& e) {
    std::string text;
    for (const Defect* d : e.defects)
      text += (text.empty() ? "" : ", and ") + std::string(d->meaning) + " (" + d->name + ")";
    text += e.detail;
    if (text.empty() && e.factor == 0) return "no step: it is zero";
    if (text.empty()) text = "the correct step";
    if (e.factor == 1) return text;
    return text + format(", times %.6g: ", e.factor) +
           (e.factor_meaning.empty() ? "a factor that no defect explains" : e.factor_meaning);
  }

  // "expert 3 of layer 1 has no gradient"; empty if a whole tensor has none.
  std::string experts_in_words(const std::vector<std::string>& names) const {
    std::set<std::string> experts;
    for (const std::string& name : names) {
      if (referee_.products(name).theirs == 0) return "";
      for (const Index e : referee_.still_experts(name)) experts.insert(format("expert %ld of ", e) + section(name));
    }
    return in_words({experts.begin(), experts.end()}) + (experts.size() == 1 ? " has" : " have") + " no gradient";
  }

  static std::string in_words(const std::vector<std::string>& names) {
    std::string text;
    for (std::size_t i = 0; i < names.size() && i < 8; ++i) text += (i > 0 ? ", " : "") + names[i];
    return text + (names.size() > 8 ? ", ..." : "");
  }

  std::string section(const std::string& name) const { return section_of(config_, referee_.parameter(name)); }

  Json entry(const std::string& name) const {
    const Products& p = referee_.products(name);
    Json result = {{"tensor", name},
                   {"distance", p.distance()},
                   {"cosine", p.cosine()},
                   {"norm_ratio", p.norm_ratio()},
                   {"right", is_right(name)}};
    for (std::size_t type = 0; type < referee_.roundings().size(); ++type)
      result["rounding"][referee_.roundings()[type].name] = referee_.rounding({name}, type);
    return result;
  }

  std::vector<std::string> row(const std::string& label, const std::vector<std::string>& names) const {
    Products sum;
    for (const std::string& name : names) sum += referee_.products(name);
    std::vector<std::string> row = {label, percent(sum.distance()), format("%.6f", sum.cosine()),
                                    format("%.5g", sum.norm_ratio())};
    for (std::size_t type = 0; type < referee_.roundings().size(); ++type)
      row.push_back(percent(referee_.rounding(names, type)));
    const auto wrong = std::ranges::count_if(names, [&](const std::string& name) { return !is_right(name); });
    row.push_back(wrong == 0 ? "" : names.size() == 1 ? "WRONG" : format("%ld of %zu WRONG", wrong, names.size()));
    return row;
  }

  void list(const char* what, const char* key, const std::vector<std::string>& names) {
    json_[key] = names;
    if (!names.empty()) print("%s %s: %s\n", counted(std::ssize(names), "tensor"), what, in_words(names));
  }

  const Config& config_;
  Referee& referee_;
  const RecordedGradient& recorded_;
  Json& json_;
};

// Looks for a defect that explains a wrong gradient, for so many minutes.
Verdict search(Referee& referee, Report& report, double minutes) {
  const Stopwatch watch;
  int tried = 0;
  std::string last;
  bool in_time = true;
  const std::vector<Explanation> found = referee.explain([&](const std::string& defects, bool has_one) {
    show_work(defects.empty() ? "factors" : format("%d defects tried; now ", tried) + defects);
    in_time = watch.seconds() < 60 * (has_one ? std::min(minutes, kMoreMinutes) : minutes);
    if (in_time && std::exchange(last, defects) != defects) ++tried;
    return in_time;
  });
  show_work("");
  if (!found.empty() && found.front().only_clipped()) return report.clipped(found.front()), Verdict::right;
  report.wrong();
  if (!found.empty()) {
    report.explained(found);
    if (!in_time) report.say("Others may explain it as well: " + counted(tried, "defect") + " tried.");
    return Verdict::wrong;
  }
  report.say(format("Not explained by a factor or any of %d defects and pairs of defects", tried) +
             (in_time ? "." : format("; the others were not tried within --minutes %g.", minutes)));
  return Verdict::wrong;
}

}  // namespace

void RefereeOptions::add_to(OptionTable& options) {
  options.section("Another trainer's gradient");
  options.add("--batch", &batches_,
              "The micro-batches of a step that another trainer recorded (scripts/dump_gradients.py), a file per rank");
  options.add(
      "--against", &against_,
      "Judge the gradient in these safetensors files: is it that of --batch, and if not, which defect explains it");
  std::vector<std::string> names;
  for (const Defect& d : all_defects()) names.push_back(d.name);
  options.add("--defect", &defect_,
              "Show what this defect does to the loss and the gradient of --batch, or of a random step. "
              "--save-gradient then writes the gradient of a trainer with this defect. streambp list "
              "defects shows them",
              checks::one_of(names));
  options.add("--computed-in", &computed_in_,
              "Type in which the trainer computes: f32, or bf16 for any narrower one, which explains "
              "larger differences; auto: what the file of the gradient says, else bf16",
              checks::one_of({"auto", "f32", "bf16"}));
  options.add("--minutes", &minutes_, "Look for a defect no longer than this", checks::positive());
}

int RefereeOptions::run(const Subject& subject, const Outputs& outputs) const {
  require(!batches_.empty() || against_.empty(), "--against needs --batch: the step that the gradient belongs to");
  require(defect_.empty() || against_.empty(), "--defect and --against cannot be combined; leave out one");
  TrainingCase correct{subject.config, batches_.empty() ? random_step(subject.config, subject.seed)
                                                        : RecordedStepReader(subject.config).read(batches_)};
  correct.config.rope_scaling.longest = correct.step.longest();
  require_one_scaling(correct);
  print("%s\n", subject.description);
  announce(correct.step);
  TrainingCase judged = correct;
  Json json;
  for (const Defect& defect : all_defects()) {
    if (defect.name != defect_) continue;
    const char* too_large = ", or it is too large for the oracle, which computes some defects; try --hidden 64";
    require(defect.apply(judged), "--defect ", defect_, ": this model or step cannot have it",
            defects::is_small(judged) ? "" : too_large);
    print("The defect: %s\n", defect.meaning);
    json["said"].push_back(std::string("The defect: ") + defect.meaning);
  }
  std::optional<RecordedGradient> recorded;
  if (!against_.empty()) recorded.emplace(against_, subject.config);
  std::fflush(stdout);
  CaseGradients gradients(subject.fill);
  const auto compute = [&](const TrainingCase& c) {
    show_work(std::string("the gradient in ") + name(subject.dtype));
    CaseGradients::Result result = gradients.compute(c, {subject.dtype});
    show_work("");
    return result;
  };
  CaseGradients::Result result = compute(judged);
  print("The gradient in %s: loss %.12g\n", name(subject.dtype), result.loss);
  json.update({{"targets", correct.step.targets()}, {"dtype", name(subject.dtype)}, {"loss", result.loss}});
  if (!defect_.empty()) show_effect(subject.config, result, compute(correct), json);
  if (outputs.save_gradient) outputs.save_gradient(result.values);
  Verdict verdict = Verdict::right;
  if (recorded) verdict = judge({correct, subject.dtype, *recorded, gradients}, std::move(result), *recorded, json);
  outputs.write(json);
  return static_cast<int>(verdict);
}

void RefereeOptions::announce(const RecordedStep& step) const {
  Index tokens = 0, documents = 0;
  for (const RecordedBatch& b : step.batches) tokens += b.batch.size(), documents += std::ssize(b.batch.documents());
  const char* loss = step.reduction == Reduction::mean  ? "the mean over all learned tokens"
                     : step.reduction == Reduction::sum ? "the sum over all learned tokens"
                                                        : "given by d loss / d log-prob";
  print("%s in %s: %s in %s (%s), %s learned; the loss is %s\n", counted(std::ssize(step.batches), "micro-batch"),
        batches_.empty() ? "a random step of 2 ranks" : counted(std::ssize(batches_), "file"), counted(tokens, "token"),
        counted(documents, "document"), step.bounds, counted(step.targets(), "token"), loss);
  if (step.outside > 0)
    print("Ignored: %s of documents' first tokens, which no token predicts\n", counted(step.outside, "label"));
}

Verdict RefereeOptions::judge(Referee referee, CaseGradients::Result exact, const RecordedGradient& recorded,
                              Json& json) const {
  print("\n");
  referee.compare(std::move(exact));
  std::vector<Types> all = {{DType::f32}, {DType::bf16, true}, {DType::bf16, false}};
  if (recorded.summed_in() == "float32") all.resize(2);
  if (computed_in_ == "f32" || (computed_in_ == "auto" && recorded.computed_in() == "float32")) all.resize(1);
  for (const Types& types : all) {
    show_work(std::string("what rounding explains: ") + types.name());
    referee.compute_rounding(types);
  }
  referee.finish_rounding();
  show_work("");
  Report report(referee.config(), referee, recorded, json);
  report.table();
  if (referee.explained() < referee.roundings().size()) {
    const std::vector<Explanation> better = referee.explain_better();
    if (better.empty() && referee.undecided()) return report.undecided(), Verdict::undecided;
    if (better.empty()) return report.right(), Verdict::right;
    if (better.front().only_clipped()) return report.clipped(better.front()), Verdict::right;
    return report.wrong(), report.explained(better), Verdict::wrong;
  }
  if (const auto part = referee.wrong_tied_part(); part != Referee::TiedPart::none)
    return report.wrong(), report.tied(part), Verdict::wrong;
  if (const auto multiple = referee.multiple()) return report.wrong(), report.multiple(*multiple), Verdict::wrong;
  const std::string first = referee.first_wrong();
  const bool some_right = first != referee.order().front() || referee.products(first).theirs > 0;
  if (referee.is_zero(first) && some_right) return report.wrong(), report.zero(first), Verdict::wrong;
  if (const auto factors = referee.factors_of_tensors())
    return report.wrong(), report.factors(factors->first, factors->second), Verdict::wrong;
  const Verdict verdict = search(referee, report, minutes_);
  if (verdict == Verdict::wrong && recorded.began_with_a_gradient()) report.stale();
  return verdict;
}

}  // namespace streambp
