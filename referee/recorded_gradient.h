// A gradient that another program recorded, in safetensors files: its tensors by the names of a parameter table. The
// prefixes that wrappers add to names (DDP, FSDP, torch.compile, PEFT) are dropped, and what comes before the model's own
// names may differ, as long as the rest is unambiguous.
#pragma once

#include <list>
#include <set>
#include <string>
#include <vector>

#include "data/files/adapters.h"
#include "referee/defects.h"

namespace streambp {

// The name without what wrappers add.
inline std::string unwrapped(std::string name) {
  const std::string inner = "base_layer.lora_";  // PEFT wraps experts twice
  if (const std::size_t at = name.find(inner); at != std::string::npos) name.replace(at, inner.size(), "inner.lora_");
  for (const char* inside : {"_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "base_layer.",
                             "modules_to_save.default.", "original_module."}) {
    for (std::size_t at; (at = name.find(inside)) != std::string::npos;) name.erase(at, std::string(inside).size());
  }
  for (const char* adapter : {".lora_A.", ".lora_B."}) {  // PEFT in memory: lora_A.default.weight
    const std::size_t at = name.find(adapter), end = at + std::string(adapter).size();
    if (at != std::string::npos && name.ends_with(".weight") && end + 6 < name.size())
      name = name.substr(0, end) + "weight";
  }
  for (const std::string before : {"module.", "base_model.model."})
    while (name.starts_with(before)) name.erase(0, before.size());
  return name;
}

class RecordedGradient {
 public:
  RecordedGradient(const std::vector<std::string>& paths, const Config& config) {
    files_.reserve(paths.size());  // stored_ points into them
    for (const std::string& path : paths) {
      files_.emplace_back(path);
      for (const auto& [key, type] :
           {std::pair{"computed_in", &computed_in_}, {"summed_in", &summed_in_}, {"began_with", &began_with_}})
        if (const auto found = files_.back().metadata().find(key); found != files_.back().metadata().end())
          *type = found->second;
      for (const auto& [stored, tensor] : files_.back().tensors()) {
        const std::string name = unwrapped(stored);
        require(!stored_.contains(name), tensor.where, ": is the second tensor of ", quote(name),
                "; is a gradient in two files?");
        stored_[name] = &tensor;
      }
    }
    for (const StoredAs& other : family_of(config).modules.others) find_pieces(other, stored_, joined_, pieces_);
    match(config, paths[0]);
  }

  // By the names of the table. Missing: parameters without a recorded gradient. Unknown: recorded tensors of no parameter.
  const std::map<std::string, const Tensor*>& tensors() const { return tensors_; }
  const std::vector<std::string>& missing() const { return missing_; }
  const std::vector<std::string>& unknown() const { return unknown_; }
  // The type of the trainer's products and of its sums over micro-batches, such as float32; empty if the files don't say.
  const std::string& computed_in() const { return computed_in_; }
  const std::string& summed_in() const { return summed_in_; }
  // Whether the trainer had a gradient before the first forward pass of the step.
  bool began_with_a_gradient() const { return began_with_ == "a gradient"; }

  // The values of a tensor's parts, one after another.
  std::vector<double> values(const std::vector<Parameter>& parts) const {
    Table<double> rows;
    std::list<std::vector<double>> memory;
    std::list<Matrix<double>> matrices;
    for (const Parameter& p : parts) rows.push_back({p, &matrices.emplace_back()});
    allocate(memory, rows);
    Cpu host(0);
    read_tensors(host, *this, "", rows);
    std::vector<double> all;
    for (const auto& part : memory) all.insert(all.end(), part.begin(), part.end());
    return all;
  }
  const Tensor& at(const std::string& name) const { return *tensors_.at(name); }

 private:
  void match(const Config& config, const std::string& path) {
    std::set<std::string> used;
    Tensors<float> none(config);
    for (const Table<float>& parts : by_stored_tensor(trained(table(config, none)))) {
      const std::string& name = parts.front().parameter.name;
      std::string found = find(name);
      if (found.empty() && of_experts(name)) found = find(unwrapped(name_in_adapter(config, name)));
      if (found.empty()) {
        missing_.push_back(name);
        continue;
      }
      const Tensor& tensor = *stored_.at(found);
      require(used.insert(found).second, tensor.where, ": could be the gradient of several parameters, such as ", name,
              "; give it its whole name");
      require(tensor.shape == stored_shape(parts), tensor.where, ": has shape ", shown(tensor.shape), ", but ", name,
              " has ", shown(stored_shape(parts)));
      tensors_[name] = &tensor;
    }
    require(!tensors_.empty(), path, ": none of its ", stored_.size(),
            " tensors is the gradient of a trained parameter, such as ", trained_parameters(config).front().name,
            "; is it of this model, and is --adapter or --lora missing?");
    for (const auto& [name, tensor] : stored_)
      if (!used.contains(name)) unknown_.push_back(name);
    if (config.tied) require_one_of_tied(config);
    for (const auto& [name, tensor] : tensors_) check(*tensor);
  }

  // The stored tensor of this name, or the only one whose name ends with it or with which it ends.
  std::string find(const std::string& name) const {
    if (stored_.contains(name)) return name;
    std::string found;
    for (const auto& [other, tensor] : stored_) {
      if (!other.ends_with("." + name) && !name.ends_with("." + other)) continue;
      if (!found.empty()) return "";
      found = other;
    }
    return found;
  }

  // A tied head may be there, too, if it is the same gradient.
  void require_one_of_tied(const Config& config) {
    const auto head = std::ranges::find(unknown_, "lm_head.weight");
    const auto embedding = tensors_.find(parameters_of(config).front().name);
    if (head == unknown_.end() || embedding == tensors_.end()) return;
    const Tensor &a = *stored_.at(*head), &b = *embedding->second;
    require(a.dtype == b.dtype && a.bytes == b.bytes && std::memcmp(a.data, b.data, a.bytes) == 0, a.where,
            " differs from ", b.where, ", but the model ties them; record the gradient of the shared tensor once");
    unknown_.erase(head);
  }

  static void check(const Tensor& tensor) {
    require(is_real(tensor), tensor.where, ": has the type ", tensor.dtype, "; a gradient is F64, F32, BF16 or F16");
    std::vector<float> block;
    for (Index first = 0; first < tensor.count; first += 1 << 20) {
      block.resize(static_cast<std::size_t>(std::min(tensor.count - first, Index{1} << 20)));
      read(tensor, first, std::ssize(block), block.data());
      for (std::size_t i = 0; i < block.size(); ++i)
        if (!std::isfinite(block[i]))
          fail(tensor.where, ": element ", first + static_cast<Index>(i), " is ", block[i],
               "; there is nothing to compare. Look for an overflow in the loss or in float16");
    }
  }

  std::vector<SafetensorsFile> files_;
  std::map<std::string, const Tensor*> stored_, tensors_;
  std::map<std::string, Tensor> joined_;  // of pieces, such as experts
  TensorPieces pieces_;
  std::vector<std::string> missing_, unknown_;
  std::string computed_in_, summed_in_, began_with_;
};

}  // namespace streambp
