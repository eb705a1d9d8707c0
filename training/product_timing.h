// The speed of one matrix product on a GPU, with our algorithm and with the library's choices.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace streambp {

struct ProductSpeed {
  double rate = 0;   // FLOP/s
  double waves = 0;  // of blocks; just above a whole number, the last wave leaves most of the GPU idle
};
struct ProductTiming {
  std::string name;
  ProductSpeed ours, with_workspace, free_choice;
  double best() const { return std::max(ours.rate, free_choice.rate); }
};

}  // namespace streambp
