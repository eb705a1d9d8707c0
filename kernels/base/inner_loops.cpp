#include "kernels/base/inner_loops.h"

namespace streambp::cpu {
namespace {

// The same functions for each type. Of one instruction set, except that bfloat16 may have a better one.
struct InstructionSet {
  const char* name;
  InnerLoops<float> f32;
  InnerLoops<double> f64;
  InnerLoops<BFloat16> bf16;
};

std::vector<InstructionSet> usable_instructions() {
#ifdef STREAMBP_INSTRUCTIONS  // the only ones that are compiled
  return {{"the compiled ones", STREAMBP_INSTRUCTIONS::inner_loops<float>(),
           STREAMBP_INSTRUCTIONS::inner_loops<double>(), STREAMBP_INSTRUCTIONS::inner_loops<BFloat16>()}};
#elif defined(__x86_64__)
  std::vector<InstructionSet> sets = {
      {"AVX2", avx2::inner_loops<float>(), avx2::inner_loops<double>(), avx2::inner_loops<BFloat16>()}};
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    sets.push_back(
        {"AVX-512", avx512::inner_loops<float>(), avx512::inner_loops<double>(), avx512::inner_loops<BFloat16>()});
    if (__builtin_cpu_supports("avx512bf16") && avx512bf16::multiplies_pairs()) {
      sets.push_back({"AVX512_BF16", sets.back().f32, sets.back().f64, avx512bf16::inner_loops<BFloat16>()});
    }
  }
  return sets;
#else
  return {{"NEON", neon::inner_loops<float>(), neon::inner_loops<double>(), neon::inner_loops<BFloat16>()}};
#endif
}

const std::vector<InstructionSet>& usable() {
  static const std::vector<InstructionSet> sets = usable_instructions();
  return sets;
}
const InstructionSet*& used() {
  static const InstructionSet* best = &usable().back();
  return best;
}

}  // namespace

template <class T>
const InnerLoops<T>& inner_loops() {
  if constexpr (std::is_same_v<T, BFloat16>) return used()->bf16;
  if constexpr (std::is_same_v<T, float>) return used()->f32;
  if constexpr (std::is_same_v<T, double>) return used()->f64;
}
template const InnerLoops<float>& inner_loops();
template const InnerLoops<double>& inner_loops();
template const InnerLoops<BFloat16>& inner_loops();

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const InstructionSet& set : usable()) names.push_back(set.name);
  return names;
}

void use_instructions(const std::string& name) {
  for (const InstructionSet& set : usable()) {
    if (name == set.name) return static_cast<void>(used() = &set);
  }
  fail("this processor has no instructions named ", quote(name), "; it has ", join(instruction_sets()));
}

}  // namespace streambp::cpu
