// What a wrong trainer computes otherwise than the model says, where no other step or configuration is the same. The
// oracle computes it (oracle.h).
#pragma once

#include <string>

#include "kernels/base/matrix.cuh"

namespace streambp {

struct Wrong {
  enum class Sees { past, everything, before, next } sees = Sees::past;  // what a token attends to in its document
  bool rotates_queries = true, rotates_keys = true;
  bool convolution_leaks = false;  // short convolutions read the document before
  bool heads_in_turn = false;      // query heads share key/value heads in turn, instead of in groups
  bool gates_attention = true;
  bool norms_values = true, values_after_norm = false;  // values that are keys are those after their norm
  // Of delta rules.
  bool state_leaks = false, rounds_state = false;    // from the document before; to bfloat16 after every row
  bool normalises_keys = true, doubles_beta = true;  // queries and keys have length 1; beta, where the model doubles it
  bool decays = true, decays_by_softplus = true, decays_by_bias = true;
  bool gates_before_norm = false, adds_one_to_output_norm = false;
  enum class Sinks { right, missing, scaled } sinks = Sinks::right;  // scaled: as scores are
  // Of feed-forwards and mixtures of experts.
  enum class GateUp { right, swapped, halves } gate_up = GateUp::right;  // halves: of a tensor where they take turns
  bool clamps = true;
  bool gates_shared = true, bias_weighs = false;  // the router's bias weighs experts, and not only chooses them
  Index expert_ranks = 1;                         // ranks that have a part of the experts each
  bool stops_at_head = false;                     // backward does not reach the layers
  enum class LayerScale { right, missing, of_branches } layer_scale = LayerScale::right;
  // Where backward is wrong, or what is added; in one layer or in all (-1). Of strength 0 nothing, of 1 completely:
  // backward multiplies a branch's gradient by 1 - strength. Or what is lost after every chunk of a row.
  std::string what = {};
  Index layer = -1, chunk = 16;
  double strength = 1;

  bool operator==(const Wrong&) const = default;

  double strength_of(const char* name, Index in_layer = -1) const {
    return what == name && (layer < 0 || layer == in_layer) ? strength : 0;
  }
};

}  // namespace streambp
