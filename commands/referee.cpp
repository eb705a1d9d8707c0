#include "commands/referee.h"

#include <unistd.h>

#include <chrono>

#include "commands/text.h"
#include "data/files/results.h"

namespace streambp {
namespace {

void progress(const std::string& what) {
  if (isatty(STDERR_FILENO)) print_error("\r\033[K%s", what);
}

constexpr int kMostShown = 40;  // tensors of the table

std::string percent(double part) { return part < 0.001 ? format("%.1e", part) : format("%.2g %%", 100 * part); }

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
                           "With --batch: give the step this defect. With --save-gradient, its gradient is what a "
                           "trainer with the defect computes",
                           checks::one_of(names)});
  options.add("--computed-in", {&computed_in_,
                                "Type in which the trainer computes: f32, or bf16 for any narrower one, which explains "
                                "larger differences; auto: what the file of the gradient says, else bf16",
                                checks::one_of({"auto", "f32", "bf16"})});
  options.add("--minutes", {&minutes_, "Look for a defect no longer than this", checks::positive()});
}

int RefereeOptions::run(const Subject& subject, const Outputs& outputs) const {
  require(!batches_.empty(), against_.empty() ? "--defect" : "--against",
          " needs --batch, the step whose gradient it is");
  require(defect_.empty() || against_.empty(), "--defect and --against cannot be combined; leave out one");
  TrainingCase c{subject.config, RecordedStepReader(subject.config).read(batches_)};
  c.config.rope_scaling.longest = c.step.longest();
  const RecordedStep& step = c.step;
  Index tokens = 0, documents = 0;
  for (const RecordedBatch& b : step.batches) tokens += b.batch.size(), documents += std::ssize(b.batch.documents());
  const char* loss = step.reduction == Reduction::mean  ? "the mean over all learned tokens"
                     : step.reduction == Reduction::sum ? "the sum over all learned tokens"
                                                        : "given by d loss / d log-prob";
  print("%s\n%s in %s: %s in %s (%s), %s learned; the loss is %s\n", subject.description,
        counted(std::ssize(step.batches), "micro-batch"), counted(std::ssize(batches_), "file"),
        counted(tokens, "token"), counted(documents, "document"), step.documents, counted(step.targets(), "token"),
        loss);
  if (step.outside > 0)
    print("%s of documents' first tokens are ignored: no token of the document predicts them\n",
          counted(step.outside, "label"));
  if (!defect_.empty()) {
    const auto& defect = *std::ranges::find_if(all_defects(), [&](const Defect& d) { return d.name == defect_; });
    require(defect.apply(c), "--defect ", defect_, ": this model or step cannot have it");
    print("with a defect: %s\n", defect.meaning);
  }
  std::optional<RecordedGradient> recorded;
  if (!against_.empty()) recorded.emplace(against_, subject.config);
  std::fflush(stdout);
  Json json = {
      {"tokens", tokens}, {"documents", documents}, {"targets", step.targets()}, {"dtype", name(subject.dtype)}};
  CaseGradients gradients(subject.fill);
  progress(std::string("the gradient in ") + name(subject.dtype));
  const CaseGradients::Result exact = gradients.compute(c, {subject.dtype});
  progress("");
  print("The gradient in %s: loss %.12g\n\n", name(subject.dtype), exact.loss);
  json["loss"] = exact.loss;
  if (outputs.save_gradient) outputs.save_gradient(exact.values);
  const bool right = !recorded || judge({c, subject.dtype, *recorded, gradients}, exact, *recorded, json);
  if (!outputs.json.empty()) write_results(outputs.json, json);
  return right ? 0 : 1;
}

bool RefereeOptions::judge(Referee referee, const CaseGradients::Result& exact, const RecordedGradient& recorded,
                           Json& json) const {
  referee.compare(exact);
  std::vector<Types> all = {{DType::f32}, {DType::bf16, true}, {DType::bf16, false}};
  if (computed_in_ == "f32" || (computed_in_ == "auto" && recorded.computed_in() == "float32")) all.resize(1);
  for (const Types& types : all) {
    progress(std::string("what rounding explains: ") + types.name());
    referee.compute_rounding(types);
  }
  progress("");
  Report report(referee, recorded, json);
  report.table();
  if (referee.explained() < referee.roundings().size()) {
    const std::vector<Explanation> better = referee.explain_better();
    if (better.empty()) return report.right(), true;
    return report.wrong(), report.explained(better), false;
  }
  report.wrong();
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
