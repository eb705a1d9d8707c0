// The parts of a layer's forward pass that backward reads, and which of them are kept.
#pragma once

#include <array>

#include "kernels/base/far.h"

namespace streambp {

// What backward reads of a layer's forward pass. The input is always kept. Each of the others is kept or computed again.
// model/activations.h says which matrices belong to a part.
enum class Part {
  input,
  keys_values,
  queries,
  attention,
  mixer_output,
  gate_up,
  feed_forward_output,
  activated,
  normed,
  count
};
inline constexpr std::size_t kParts = static_cast<std::size_t>(Part::count);
inline constexpr std::array<const char*, kParts> kPartNames = {
    "inputs",  "keys-values",         "queries",   "attention", "mixer-output",
    "gate-up", "feed-forward-output", "activated", "normed"};

// Which rows a matrix of a chunk has: this rank's, with all heads, or all rows, with this rank's heads.
enum class View { own_rows, all_rows };

// Where a layer keeps each part.
class KeptParts {
 public:
  constexpr explicit KeptParts(Place place) { places_.fill(place); }
  constexpr static KeptParts nothing() { return KeptParts(Place::nowhere); }
  constexpr static KeptParts everything() { return KeptParts(Place::near); }
  constexpr static KeptParts inputs(Place place = Place::near) { return nothing().with(Part::input, place); }

  constexpr Place place(Part part) const { return places_[static_cast<std::size_t>(part)]; }
  constexpr bool have(Part part) const { return place(part) != Place::nowhere; }
  constexpr KeptParts with(Part part, Place place = Place::near) const {
    KeptParts result = *this;
    result.places_[static_cast<std::size_t>(part)] = place;
    return result;
  }

  bool operator==(const KeptParts&) const = default;

 private:
  std::array<Place, kParts> places_;
};

}  // namespace streambp
