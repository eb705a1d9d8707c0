// How a recorded gradient differs from another one, and what explains it.
#pragma once

#include <span>

#include "referee/case_gradients.h"

namespace streambp {

// The values of each tensor; fused ones part after part.
using Gradient = std::map<std::string, std::vector<double>>;

inline Gradient by_name(CaseGradients::Result from) {
  Gradient result;
  for (std::size_t i = 0; i < from.values.size(); ++i) {
    std::vector<double>& all = result[from.parameters[i].name];
    if (all.empty()) {
      all = std::move(from.values[i]);  // of a large model there is no room for a copy
    } else {
      all.insert(all.end(), from.values[i].begin(), from.values[i].end());
    }
  }
  return result;
}

// Inner products of a recorded tensor and ours.
struct Products {
  double ours = 0, theirs = 0, both = 0, difference = 0;  // squares of the norms, ⟨theirs, ours⟩, ‖theirs - ours‖²

  Products() = default;
  Products(std::span<const double> a, std::span<const double> b) {
    for (std::size_t i = 0; i < a.size(); ++i) {
      theirs += a[i] * a[i], ours += b[i] * b[i], both += a[i] * b[i];
      difference += (a[i] - b[i]) * (a[i] - b[i]);
    }
  }
  Products& operator+=(const Products& more) {
    ours += more.ours, theirs += more.theirs, both += more.both, difference += more.difference;
    return *this;
  }
  double distance() const { return distance(1); }
  // ‖theirs - factor ours‖ / ‖factor ours‖
  double distance(double factor) const {
    if (factor == 1) return ratio(difference, ours);
    return ratio(std::max(theirs - 2 * factor * both + factor * factor * ours, 0.0), factor * factor * ours);
  }
  double cosine() const { return theirs > 0 && ours > 0 ? both / std::sqrt(theirs) / std::sqrt(ours) : 0; }
  double norm_ratio() const { return ratio(theirs, ours); }
  double best_factor() const { return ours > 0 ? both / ours : 0; }

 private:
  static double ratio(double a, double b) { return b > 0 ? std::sqrt(a / b) : a > 0 ? INFINITY : 0; }
};

// Of a tensor of experts: those without a gradient where ours is not zero, and ‖theirs - ours‖² of all others.
struct ExpertParts {
  std::set<Index> still;
  double difference = 0;

  ExpertParts(const std::vector<Parameter>& parts, Index count, std::span<const double> theirs,
              std::span<const double> ours) {
    std::size_t at = 0;
    for (const Parameter& p : parts) {
      const auto size = static_cast<std::size_t>(p.rows * p.cols / count);
      for (Index e = 0; e < count; ++e, at += size) {
        const Products expert(theirs.subspan(at, size), ours.subspan(at, size));
        if (expert.theirs == 0 && expert.ours > 0) {
          still.insert(e);
        } else {
          difference += expert.difference;
        }
      }
    }
  }
};

// The largest part of a gradient that a verdict leaves to rounding in its scale, or of a tensor in sums in bfloat16.
constexpr double kMostRounding = 0.05;

// The error that a type of weights, activations and gradient has on this batch: ‖rounded - exact‖ of each tensor.
struct Rounding {
  const char* name;
  bool of_sums;    // also that of adding micro-batches in bfloat16, which grows with their number
  double allowed;  // times this error: other trainers sum in other orders and round elsewhere
  std::map<std::string, double> error;
};

// The gradient of a delta rule's decay is what remains of terms as large as those of beta: little, if states are forgotten at
// once. We add most of these terms in double; other trainers lose what float32 loses of them, also beside bfloat16. A_log and
// dt_bias have few numbers, sums over rows that may cancel. The weight has the same sums, of rows times its normed input.
inline void allow_lost_decay(const Config& c, const std::map<std::string, double>& in_float32,
                             std::map<std::string, double>& errors) {
  const Modules& m = family_of(c).modules;
  const std::string decay = m.decay;
  for (auto& [name, error] : errors) {
    const std::size_t at = decay.empty() ? std::string::npos : name.find(decay);
    if (at == std::string::npos) continue;
    const std::string layer = name.substr(0, at);
    const auto beta = in_float32.find(layer + m.beta + name.substr(at + decay.size()));
    if (beta != in_float32.end()) error = std::max(error, 4 * beta->second);
    for (const char* part : {m.a_log, m.dt_bias}) {
      const auto vector = errors.find(layer + part);
      if (vector != errors.end())
        vector->second = std::max(vector->second, 4 * error / std::sqrt(static_cast<double>(c.hidden)));
    }
  }
}

struct Explanation {
  std::vector<const Defect*> defects;  // none: a factor alone
  double factor = 1;
  std::string factor_meaning = "";  // empty: 1
  double distance = 0;              // of what is compared, after the factor
  std::size_t rounding = 0;         // which type explains the rest
  bool clipped = false;
  std::string detail = "";  // the strength of the defect and its place
  std::size_t leading = 0;  // tensors, in the order of backward, if it explains no more than these
  bool named() const { return factor == 1 || !factor_meaning.empty(); }
  bool only_clipped() const { return defects.empty() && clipped; }
};

// Those with the smallest rounding, and of these the simplest.
inline std::vector<Explanation> best(std::vector<Explanation> found) {
  const auto rank = [](const Explanation& e) {
    return std::tuple(e.rounding, !e.named(), std::ssize(e.defects) + (e.factor != 1));
  };
  std::ranges::stable_sort(found, {}, [&](const Explanation& e) { return std::pair(rank(e), e.distance); });
  std::erase_if(found, [first = found.empty() ? decltype(rank(Explanation()))() : rank(found.front()),
                        &rank](const Explanation& e) { return rank(e) != first; });
  return found;
}

// The next number with two digits: what people clip to.
inline double rounded_limit(double norm) {
  const double unit = std::pow(10, std::floor(std::log10(norm)) - 1);
  return std::round(norm / unit) * unit;
}
inline std::string shown_number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", x);
  return text;
}

}  // namespace streambp
