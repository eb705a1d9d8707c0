// Errors in a run: before they end it, the weights after the last good step are saved.
#pragma once

#include <functional>
#include <new>
#include <string>
#include <type_traits>

#include "parallel/processes.h"
#include "training/grpo/online_grpo.h"

namespace streambp {

class Rescue {
 public:
  // save(done): saves the weights after step `done`, with all ranks; returns why it cannot. checkpoint(): describes
  // the last one.
  Rescue(std::function<std::string(Index done)> save, std::function<std::string()> checkpoint)
      : save_(std::move(save)), checkpoint_(std::move(checkpoint)) {}

  // Runs f, which needs no other rank. If it fails on any of them, all save the weights after step `done`.
  template <class F>
  void on_this_rank(Index done, F&& f) const {
    std::string failure;
    try {
      f();
    } catch (const std::exception& error) {
      failure = reason(error);
    }
    failure = any_of_ranks(failure);
    if (!failure.empty()) end(failure, done);
  }

  // Returns f(), in which all ranks take part. If it fails, the weights are still those after step `done`.
  template <class F>
  std::invoke_result_t<F> together(Index done, F&& f) const {
    try {
      return f();
    } catch (const std::exception& error) {
      // Saving needs all ranks, and after most errors the others have not failed.
      const bool all_failed = this_process().count == 1 || dynamic_cast<const RewardError*>(&error) != nullptr;
      end(reason(error), all_failed ? done : 0);
    }
  }

  static std::string reason(const std::exception& error) {
    return dynamic_cast<const std::bad_alloc*>(&error) ? "out of host memory" : error.what();
  }

 private:
  [[noreturn]] void end(const std::string& why, Index done) const {
    const std::string not_saved = save_(done);
    const bool known = not_saved.empty() || not_saved == why;
    fail(why, "; ", checkpoint_(), known ? "" : "; the last step could not be saved: " + not_saved);
  }

  const std::function<std::string(Index)> save_;
  const std::function<std::string()> checkpoint_;
};

}  // namespace streambp
