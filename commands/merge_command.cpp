// streambp merge: adapters become part of a whole model.

#include "commands/command.h"
#include "commands/part_options.h"
#include "data/files/checkpoint.h"
#include "data/files/hash.h"
#include "data/files/merge.h"

namespace streambp {
namespace {

constexpr const char* kMergeDescription =
    "Write the model that a base and its adapters are together.\n\n"
    "  streambp merge --adapter tuned --out merged\n\n"
    "Each weight becomes weight + scale b a, in float32, rounded to the type of the base's files. The result is a "
    "model\n"
    "directory like that of the base; it needs no adapters any more. It needs memory for one tensor\n"
    "of the base at a time.\n\n"
    "If the base is a GGUF file, the result can be one, too: the merged weights are in the type\n"
    "--save-dtype, everything else stays as it is. Other types are llama-quantize's.\n\n"
    "  streambp merge --adapter tuned --out merged.gguf --save-dtype q8_0";

class MergeCommand : public Command {
 public:
  explicit MergeCommand(CLI::App& app) : Command(app, "merge", kMergeDescription) {
    source.add_to(options);
    options.require("--adapter");
    options.add("--out", &out, "The model directory or GGUF file to write; it must not exist");
    options.require("--out");
    options.add("--save-dtype", &save_dtype,
                "Type of the saved weights; same: as in the base; what is in 4 bits and gets adapters: bf16, in GGUF "
                "files q8_0",
                checks::one_of({"same", "f32", "bf16", "f16", "q8_0", "q4_0"}));
  }

 private:
  void run() override {
    fs::path directory = fs::path(out).lexically_normal();
    if (!directory.has_filename()) directory = directory.parent_path();  // "merged/"
    const fs::path temporary = directory.string() + ".tmp-" + std::to_string(std::random_device()());
    for (const fs::path& path : {directory, temporary})
      require(!fs::exists(fs::symlink_status(path)), path.string(), ": exists; name a new one with --out");
    source.resolve();
    check_base();
    const Config config = source.config();
    if (extension_of(out) == ".gguf") return save_gguf(config);
    require(save_dtype[0] != 'q', "--save-dtype ", save_dtype, " is for GGUF files; name one with --out FILE.gguf");
    ModelLayout layout{fs::path(source.model)};
    const auto adapted = [&](const Parameter& p) { return p.experts > 0 && config.adapters.contains(p.module()); };
    if (save_dtype == "same" && read_config(source.model).base == Base::nf4) save_dtype = "bf16";
    if (std::ranges::any_of(parameters_of(config), adapted)) layout.unpack_experts("BF16");
    if (save_dtype != "same") layout.store_as(save_dtype == "f32" ? "F32" : save_dtype == "bf16" ? "BF16" : "F16");
    layout.require_writable(config);
    Merge merged(source.model, source.adapter, config);
    create_directory_atomically(directory, temporary, [&](const fs::path&) { merged.save(temporary, layout); });
    print("%s: %s with the adapters of %s\n", out, source.model, source.adapter);
  }

  void save_gguf(const Config& config) {
    require(is_gguf(source.model), source.model, ": is not a GGUF file, so ", out, " cannot be like it; merge to a ",
            "directory, and convert that with llama.cpp's convert_hf_to_gguf.py");
    const std::map<std::string, BlockType> types = {{"f32", BlockType::f32},   {"f16", BlockType::f16},
                                                    {"bf16", BlockType::bf16}, {"q4_0", BlockType::q4_0},
                                                    {"q8_0", BlockType::q8_0}, {"same", BlockType::q8_0}};
    Merge(source.model, source.adapter, config).save_gguf(out, source.model, types.at(save_dtype));
    print("%s: %s with the adapters of %s\n", out, source.model, source.adapter);
  }

  // Adapters that this program trained say what their base holds.
  void check_base() const {
    require(has_file(fs::path(source.model) / "tokenizer.json"), source.model,
            ": has no tokenizer.json, without which ",
            "nothing could use the merged model; copy the tokenizer's files of the base there");
    const Json state = is_complete_checkpoint(source.adapter) ? read_sealed_json(state_of(source.adapter)) : Json();
    require(!state.contains("base") || state["base"] == contents_key(source.model), source.model,
            ": is not the base that the adapters of ", source.adapter,
            " were trained on; name that one with --model, or ",
            "copy the adapters alone to another directory to merge them all the same");
  }

  ModelSource source;
  std::string out, save_dtype = "same";
};

}  // namespace

std::unique_ptr<Command> merge_command(CLI::App& app) { return std::make_unique<MergeCommand>(app); }

}  // namespace streambp
