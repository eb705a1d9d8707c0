// What exists of a layer while the walk goes through it, and what stays between forward and backward.
#pragma once

#include <vector>

#include "kernels/base/device.cuh"
#include "kernels/base/matrix.cuh"

namespace streambp {

// K and V of a layer, or their gradients: N x kv_width each.
template <class T>
struct KeysValues {
  Matrix<T> k, v;
};

// Activations of a layer for C rows, in the order in which they come to be; q is the width of all query heads.
template <class T>
struct Activations {
  Matrix<T> attention_input;   // C x hidden    norm(x)
  Matrix<T> k_projected;       // C x kv        before the norm of heads, where there is one
  Matrix<T> q_projected;       // C x q         likewise
  Matrix<T> q;                 // C x q         turned by position
  Matrix<T> attended;          // C x q
  Matrix<T> attention_output;  // C x hidden    attended oᵀ, only where it is normed
  Matrix<Accumulator<T>> lse;  // C x heads     log Σ exp of the attention scores
  Matrix<T> middle;            // C x hidden    x + attention
  Matrix<T> mlp_input;         // C x hidden    norm(middle)
  Matrix<T> gate, up;          // C x mlp       gate only where the MLP has one
  Matrix<T> activated;         // C x mlp       the input of the last projection
  Matrix<T> mlp_output;        // C x hidden    its output, only where it is normed
};

// What forward leaves for backward, allocated as two stacks that shrink from the last layer to the first.
template <class T>
struct Saved {
  Matrix<T> output;  // N x hidden    of the last layer; backward turns it into the gradient of each layer's input
  struct OfLayer {
    Matrix<T> input;             // N x hidden
    Activations<T> activations;  // only with Keep::activations
    KeysValues<T> keys_values;   // likewise
    Arena::Mark mark;            // releasing it frees this layer's things and those of later layers
  };
  std::vector<OfLayer> layers;
};

}  // namespace streambp
