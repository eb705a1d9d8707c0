#include "commands/referee.h"

#include <unistd.h>

#include <chrono>

#include "commands/text.h"
#include "data/files/results.h"
#include "training/verify/random_documents.h"

namespace streambp {
namespace {

void progress(const std::string& what) {
  if (isatty(STDERR_FILENO)) print_error("\r\033[K%s", what);
}

constexpr int kMostShown = 40;  // tensors of the table

std::string percent(double part) {
  if (part == 0) return "0";
  return part < 0.001 ? format("%.1e", part) : format(part < 1 ? "%.2g %%" : "%.0f %%", 100 * part);
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
  Report(Referee& referee, const RecordedGradient& recorded, Json& json)
      : referee_(referee), recorded_(recorded), json_(json) {}

  void table() {
    std::vector<std::string> header = {"tensor, in the order of backward", "distance", "cosine", "norm ratio"};
    for (const Rounding& r : referee_.roundings()) header.push_back(r.name);
    header.push_back("");
    TextTable table(header);
    int shown = 0, left = 0;
    const bool all = std::ssize(referee_.order()) <= kMostShown;
    for (const std::string& name : referee_.order()) {
      const Products& p = referee_.products(name);
      const bool right = is_right(name);
      std::vector<std::string> row = {name, percent(p.distance()), format("%.6f", p.cosine()),
                                      format("%.5g", p.norm_ratio())};
      Json entry = {{"tensor", name},
                    {"distance", p.distance()},
                    {"cosine", p.cosine()},
                    {"norm_ratio", p.norm_ratio()},
                    {"right", right}};
      for (const Rounding& r : referee_.roundings()) {
        const double error = p.ours > 0 ? r.error.at(name) / std::sqrt(p.ours) : 0;
        row.push_back(percent(error));
        entry["rounding"][r.name] = error;
      }
      row.push_back(right ? "" : "WRONG");
      json_["tensors"].push_back(entry);
      const bool show = all || (!right && shown < kMostShown);
      if (show) table.add(row);
      show ? ++shown : ++left;
    }
    if (shown > 0) table.print();
    if (left > 0) print("%s more; --json FILE has all of them.\n", counted(left, "tensor"));
    list("without a recorded gradient", "missing", recorded_.missing());
    list("recorded, but of no trained parameter", "unknown", recorded_.unknown());
    print("\n");
  }

  bool is_right(const std::string& name) const { return referee_.explained_by(name) < referee_.roundings().size(); }

  void right() const {
    const Rounding& r = referee_.roundings()[referee_.explained()];
    print("Right: %s explains every difference of these %s.\n", rounding(r),
          counted(std::ssize(referee_.order()), "tensor"));
    json_["verdict"] = "right", json_["rounding"] = r.name;
  }

  void wrong() const {
    std::string first, worst;
    const bool some = referee_.explained() == referee_.roundings().size();
    for (const std::string& name : referee_.order()) {
      if (some && is_right(name)) continue;
      if (first.empty()) first = name;
      if (worst.empty() || referee_.products(name).distance() > referee_.products(worst).distance()) worst = name;
    }
    print("WRONG, first in %s. The largest difference is %s, in %s.\n", first,
          percent(referee_.products(worst).distance()), worst);
    json_["verdict"] = "wrong", json_["first"] = first, json_["worst"] = worst;
  }

  void tied(const std::string& part) const {
    print("Explained: all other tensors are right, and of the tied embedding's gradient %s is missing or wrong.\n",
          part);
    json_["explanation"] = {{"missing", part}, {"tensors", {referee_.order().back()}}};
  }

  void multiple(const Referee::Multiple& m) const {
    const std::string what = m.factor == 0   ? "is missing: it is zero"
                             : m.factor == 2 ? "is counted twice"
                                             : format("is %.6g times what it should be", m.factor);
    print("Explained: all other tensors are right, and the gradient of %s %s: %s\n",
          counted(std::ssize(m.names), "tensor"), what, in_words(m.names));
    json_["explanation"] = {{"factor", m.factor}, {"tensors", m.names}};
  }

  void explained(const std::vector<Explanation>& found) const {
    const Explanation& best = found.front();
    print("Explained: up to %s (%s), your gradient is that of %s.\n", rounding(referee_.roundings()[best.rounding]),
          percent(best.distance), meaning(best));
    Json all = Json::array();
    for (const Explanation& e : found) {
      Json names = Json::array();
      for (const Defect* d : e.defects) names.push_back(d->name);
      all.push_back({{"defects", names},
                     {"factor", e.factor},
                     {"factor_meaning", e.factor_meaning},
                     {"distance", e.distance},
                     {"rounding", referee_.roundings()[e.rounding].name}});
      if (&e != &best) print("This step cannot tell it from %s.\n", meaning(e));
    }
    json_["explanations"] = all;
  }

 private:
  static std::string rounding(const Rounding& r) { return std::string("rounding in ") + r.name; }

  static std::string meaning(const Explanation& e) {
    std::string text;
    for (const Defect* d : e.defects)
      text += (text.empty() ? "" : ", and ") + std::string(d->meaning) + " (" + d->name + ")";
    if (text.empty()) text = "the correct step";
    if (e.factor == 1) return text;
    return text + format(", times %.6g: ", e.factor) +
           (e.factor_meaning.empty() ? "a factor that no defect explains" : e.factor_meaning);
  }

  static std::string in_words(const std::vector<std::string>& names) {
    std::string text;
    for (std::size_t i = 0; i < names.size() && i < 8; ++i) text += (i > 0 ? ", " : "") + names[i];
    return text + (names.size() > 8 ? ", ..." : "");
  }

  void list(const char* what, const char* key, const std::vector<std::string>& names) {
    json_[key] = names;
    if (!names.empty()) print("%s %s: %s\n", counted(std::ssize(names), "tensor"), what, in_words(names));
  }

  Referee& referee_;
  const RecordedGradient& recorded_;
  Json& json_;
};

}  // namespace

void RefereeOptions::add_to(OptionTable& options) {
  options.section("Another trainer's gradient");
  options.add(
      "--batch",
      {&batches_,
       "The micro-batches of a step that another trainer recorded (scripts/dump_gradients.py), a file per rank"});
  options.add(
      "--against",
      {&against_,
       "Judge the gradient in these safetensors files: is it that of --batch, and if not, which defect explains it"});
  std::vector<std::string> names;
  for (const Defect& d : all_defects()) names.push_back(d.name);
  options.add("--defect", {&defect_,
                           "Show what this defect does to the loss and the gradient of --batch, or of a random step. "
                           "--save-gradient then writes the gradient of a trainer with this defect",
                           checks::one_of(names)});
  options.add("--computed-in", {&computed_in_,
                                "Type in which the trainer computes: f32, or bf16 for any narrower one, which explains "
                                "larger differences; auto: what the file of the gradient says, else bf16",
                                checks::one_of({"auto", "f32", "bf16"})});
  options.add("--minutes", {&minutes_, "Look for a defect no longer than this", checks::positive()});
}

int RefereeOptions::run(const Subject& subject, const Outputs& outputs) const {
  require(!batches_.empty() || against_.empty(), "--against needs --batch, the step whose gradient it is");
  require(defect_.empty() || against_.empty(), "--defect and --against cannot be combined; leave out one");
  TrainingCase correct{subject.config, batches_.empty() ? random_step(subject.config, subject.seed)
                                                        : RecordedStepReader(subject.config).read(batches_)};
  correct.config.rope_scaling.longest = correct.step.longest();
  print("%s\n", subject.description);
  announce(correct.step);
  TrainingCase judged = correct;
  for (const Defect& defect : all_defects()) {
    if (defect.name != defect_) continue;
    require(defect.apply(judged), "--defect ", defect_, ": this model or step cannot have it");
    print("The defect: %s\n", defect.meaning);
  }
  std::optional<RecordedGradient> recorded;
  if (!against_.empty()) recorded.emplace(against_, subject.config);
  std::fflush(stdout);
  CaseGradients gradients(subject.fill);
  const auto compute = [&](const TrainingCase& c) {
    progress(std::string("the gradient in ") + name(subject.dtype));
    CaseGradients::Result result = gradients.compute(c, {subject.dtype});
    progress("");
    return result;
  };
  CaseGradients::Result result = compute(judged);
  print("The gradient in %s: loss %.12g\n", name(subject.dtype), result.loss);
  Json json = {{"targets", correct.step.targets()}, {"dtype", name(subject.dtype)}, {"loss", result.loss}};
  if (!defect_.empty()) show_effect(subject.config, result, compute(correct), json);
  if (outputs.save_gradient) outputs.save_gradient(result.values);
  const bool right =
      !recorded || judge({correct, subject.dtype, *recorded, gradients}, std::move(result), *recorded, json);
  if (!outputs.json.empty()) write_results(outputs.json, json);
  return right ? 0 : 1;
}

void RefereeOptions::announce(const RecordedStep& step) const {
  Index tokens = 0, documents = 0;
  for (const RecordedBatch& b : step.batches) tokens += b.batch.size(), documents += std::ssize(b.batch.documents());
  const char* loss = step.reduction == Reduction::mean  ? "the mean over all learned tokens"
                     : step.reduction == Reduction::sum ? "the sum over all learned tokens"
                                                        : "given by d loss / d log-prob";
  print("%s in %s: %s in %s (%s), %s learned; the loss is %s\n", counted(std::ssize(step.batches), "micro-batch"),
        batches_.empty() ? "a random step of 2 ranks" : counted(std::ssize(batches_), "file"), counted(tokens, "token"),
        counted(documents, "document"), step.documents, counted(step.targets(), "token"), loss);
  if (step.outside > 0)
    print("%s of documents' first tokens are ignored: no token of the document predicts them\n",
          counted(step.outside, "label"));
}

bool RefereeOptions::judge(Referee referee, CaseGradients::Result exact, const RecordedGradient& recorded,
                           Json& json) const {
  print("\n");
  referee.compare(std::move(exact));
  std::vector<Types> all = {{DType::f32}, {DType::bf16, true}, {DType::bf16, false}};
  if (computed_in_ == "f32" || (computed_in_ == "auto" && recorded.computed_in() == "float32")) all.resize(1);
  for (const Types& types : all) {
    progress(std::string("what rounding explains: ") + types.name());
    referee.compute_rounding(types);
  }
  referee.finish_rounding();
  progress("");
  Report report(referee, recorded, json);
  report.table();
  if (referee.explained() < referee.roundings().size()) {
    const std::vector<Explanation> better = referee.explain_better();
    if (better.empty()) return report.right(), true;
    return report.wrong(), report.explained(better), false;
  }
  report.wrong();
  if (const std::string part = referee.missing_tied_part(); !part.empty()) return report.tied(part), false;
  if (const auto multiple = referee.multiple()) return report.multiple(*multiple), false;
  const auto start = std::chrono::steady_clock::now();
  int tried = 0;
  bool in_time = true;
  const std::vector<Explanation> found = referee.explain([&](const std::string& defects) {
    progress(format("%d tried; now ", ++tried) + (defects.empty() ? "factors" : defects));
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    return in_time = passed.count() < 60 * minutes_;
  });
  progress("");
  if (!found.empty()) return report.explained(found), false;
  print("Not explained by any of %d defects and pairs of defects%s.\n", tried,
        in_time ? "" : format("; the others were not tried within --minutes %g", minutes_));
  return false;
}

}  // namespace streambp
