// How the library reports the progress of long work. It prints nothing itself.
#pragma once

#include <functional>

#include "kernels/base/matrix.cuh"

namespace streambp {

struct Progress {
  std::string work;     // such as "tokenising chats.jsonl"
  double fraction = 0;  // 1 once it is done
  Index tokens = 0;     // so far, where they are counted
};

// May be called very often.
using OnProgress = std::function<void(const Progress&)>;

}  // namespace streambp
