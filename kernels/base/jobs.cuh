// One launch for many matrices. A model has hundreds of tensors, and most are so small that a launch takes longer than its
// work. So whatever is done to all of them, such as an optimizer's update, is a list of jobs, and one launch runs as many
// as its arguments can describe.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "kernels/base/packs.cuh"

namespace streambp::cuda {

// The argument of a kernel: some jobs. A thread block works for one of them.
template <class Job>
struct Jobs {
  static constexpr std::size_t kArguments = 4096;  // bytes; newer drivers take more
  static constexpr std::size_t kMost = (kArguments - 16) / (sizeof(Job) + sizeof(unsigned));

  Job jobs[kMost];  // unused places repeat the first job
  unsigned first_block[kMost] = {};
  unsigned blocks = 0;
  int count = 0;

  template <std::size_t... i>
  Jobs(std::span<const Job> some, std::index_sequence<i...>) : jobs{some[i < some.size() ? i : 0]...} {
    for (const Job& job : some) first_block[count++] = blocks, blocks += static_cast<unsigned>(job.blocks());
  }
};

// Each thread block finds its job: the last one that does not begin after it. Jobs without blocks are never found.
template <class Job>
__global__ void __launch_bounds__(kThreads) jobs_kernel(const __grid_constant__ Jobs<Job> all) {
  int found = 0;
  for (int end = all.count; end - found > 1;) {
    const int middle = (found + end) / 2;
    (all.first_block[middle] <= blockIdx.x ? found : end) = middle;
  }
  all.jobs[found](static_cast<Index>(blockIdx.x - all.first_block[found]));
}

// Runs all jobs. A job has blocks() of kThreads threads, and job(i) is the work of block i.
template <class Job>
void run(Cuda& dev, const std::vector<Job>& jobs) {
  constexpr std::size_t most = Jobs<Job>::kMost;
  static_assert(sizeof(Jobs<Job>) <= Jobs<Job>::kArguments);
  for (std::size_t first = 0; first < jobs.size(); first += most) {
    const auto some = std::span(jobs).subspan(first, std::min(most, jobs.size() - first));
    const Jobs<Job> argument(some, std::make_index_sequence<most>());
    launch(dev, jobs_kernel<Job>, grid_of(argument.blocks), kThreads, 0, argument);
  }
}

// A job: f(N, i, j) for columns j .. j + N of every row i of a matrix, as in for_each_pack.
template <class F>
struct Elements {
  F f;
  Index rows, packs;  // of a row
  bool packed;        // N = 8, else N = 1

  Index blocks() const { return ceil_div(rows * packs, kThreads); }
  __device__ void operator()(Index block) const {
    const Index number = block * kThreads + threadIdx.x, i = rows == 1 ? 0 : number / packs, pack = number - i * packs;
    if (number >= rows * packs) return;
    if (packed) {
      f(std::integral_constant<int, kPack>{}, i, pack * kPack);
    } else {
      f(std::integral_constant<int, 1>{}, i, pack);
    }
  }
};

// For matrices of equal shape (or empty ones), as in for_each_element.
template <class F, class U, class... T>
Elements<F> elements(const F& f, Matrix<U> first, Matrix<T>... m) {
  flatten(first, m...);
  const bool packed = packable(first, m...);
  return {f, first.rows, packed ? first.cols / kPack : first.cols, packed};
}

}  // namespace streambp::cuda
