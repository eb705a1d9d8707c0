#include "parallel/processes.h"

#include <algorithm>

namespace streambp {

const Group& all_ranks() {
  static const Ranks ranks = ranks_of_run(1);
  return ranks.all;
}

namespace {

std::vector<std::string> of_all_ranks(const std::string& text) {
  std::vector<std::string> texts;
  for (const auto& characters : gather_on_host(all_ranks(), std::vector<char>(text.begin(), text.end()))) {
    texts.emplace_back(characters.begin(), characters.end());
  }
  return texts;
}

}  // namespace

std::string from_first(const std::string& text) { return of_all_ranks(text).front(); }

std::string any_of_ranks(const std::string& text) {
  for (const std::string& of_rank : of_all_ranks(text))
    if (!of_rank.empty()) return of_rank;
  return "";
}

void require_equal(const std::string& what, const std::string& text, const std::string& remedy) {
  const std::vector<std::string> texts = of_all_ranks(text);
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    require(texts[rank] == texts[0], "rank ", rank, " has ", what, " ", quote(texts[rank]), ", but rank 0 has ",
            quote(texts[0]), "; ", remedy);
  }
}

void require_different(const std::string& what, const std::string& text, const std::string& remedy) {
  const std::vector<std::string> texts = of_all_ranks(text);
  for (auto later = texts.begin(); later != texts.end(); ++later) {
    const auto first = std::find(texts.begin(), later, *later);
    require(first == later, "ranks ", first - texts.begin(), " and ", later - texts.begin(), " both use ", what, " ",
            *later, "; ", remedy);
  }
}

Index least_of_ranks(Index number) {
  Index least = number;
  for (const auto& of_rank : gather_on_host(all_ranks(), std::vector<Index>{number}))
    least = std::min(least, of_rank[0]);
  return least;
}

Index largest_of_ranks(Index number) { return -least_of_ranks(-number); }

}  // namespace streambp
