// The description of a model family, from which config.json is read and written, tensors get their names, and --family and
// the names of published models get their configurations. A family that differs from others in fields of Config only is
// one more description (model/families), and no other change.
//
// What `defaults` say about the architecture holds for all models of a family; its fields replace the rest.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "model/config.h"

namespace streambp {

template <class V>
using Member = V Config::*;

// A field of config.json stands for a member of Config, or is one of these:
struct Fixed {};    // always has this value
struct Only {};     // the same, but need not be written
struct Needed {};   // as Fixed, and files must have it
struct Ignored {};  // has no effect
struct Empty {};    // a list without entries
struct Either {     // as Fixed, or this value
  const char* other;
};
struct AllOf {  // a list of nothing but the usual value and this one
  const char* other;
};
struct Inverse {
  Member<double> member;  // the field is 1 / member
};
struct InverseSquare {
  Member<double> member;  // the field is 1 / member²
};
struct OrNull {
  Member<double> member;  // a number, or null for 0
};
struct HasNorms {
  QkNorm kind;  // true: of queries and keys
};

// A value that follows from fields further up.
struct Formula {
  const char* text;
  double (*of)(const Config&);
  bool of_delta_rule = false;  // holds for new models, too
};

enum class Written { always, if_unusual };

struct Field {
  const char* name;  // empty: in no file
  std::variant<Member<Index>, Member<double>, Member<bool>, Inverse, InverseSquare, OrNull, HasNorms, Fixed, Only,
               Needed, Either, AllOf, Empty, Ignored>
      meaning;
  // The value in files that do not have the field. Without one they must have it.
  std::variant<std::monostate, Index, double, bool, const char*, Formula> value = {};
  Written written = Written::always;
};

// Which layers are local if a file does not list them. `upper` needs "use_sliding_window", all_if_named needs
// "sliding_window"; `all` cannot list them; of `most`, every n-th layer is global.
enum class LocalLayers { none, all, all_or_listed, all_if_named, upper, most };

// A tensor that files may have under another name, or in several pieces, one after the other: % is the number of an expert.
struct StoredAs {
  std::vector<const char*> stored;
  const char* tensor;
};

// The names of modules in files; their tensors are NAME.weight and NAME.bias. Linear layers of one name are parts of one
// tensor, in the order of the layer's table.
struct Modules {
  const char *tokens = "model.embed_tokens", *positions = "", *layers = "model.layers.", *norm = "model.norm";
  // in a layer
  const char *attention_norm = "input_layernorm", *mlp_norm = "post_attention_layernorm";
  const char *q = "self_attn.q_proj", *k = "self_attn.k_proj", *v = "self_attn.v_proj", *o = "self_attn.o_proj";
  const char *q_norm = "self_attn.q_norm", *k_norm = "self_attn.k_norm", *sinks = "self_attn.sinks";
  const char* attention_gate = "";  // empty: in one tensor with q
  const char *post_attention_norm = "", *post_mlp_norm = "", *layer_scale = "";
  const char *convolution_in = "", *convolution = "", *convolution_out = "";
  const char *delta_q = "", *delta_k = "", *delta_v = "", *z = "", *beta = "", *decay = "", *a_log = "", *dt_bias = "",
             *output_norm = "", *delta_out = "";
  const char *router = "mlp.gate", *router_bias = "", *experts_in = "mlp.experts.gate_up_proj",
             *experts_out = "mlp.experts.down_proj";
  const char *shared_router = "mlp.shared_expert_gate", *shared_gate = "mlp.shared_expert.gate_proj",
             *shared_up = "mlp.shared_expert.up_proj", *shared_down = "mlp.shared_expert.down_proj";
  const char *gate = "mlp.gate_proj", *up = "mlp.up_proj", *down = "mlp.down_proj";

  bool transposed = false;                                       // linear layers are stored as (inputs x outputs)
  bool experts_transposed = false, experts_interleaved = false;  // of experts; gate and up in turns, row by row
  const char* root = "";  // comes before all names but the head's: always in adapters, sometimes in models
  std::vector<const char*> unused = {};  // the ends of names of tensors that files have without need
  std::vector<StoredAs> others = {};     // what files may have otherwise
};

// What distinguishes the models of a family.
struct Sizes {
  Index vocab, hidden, layers, heads, kv_heads, head_dim, mlp, max_length;
  bool tied;
  Index experts = 0, experts_per_token = 0;  // 0: as many as are usual in the family
};
struct Published {
  const char* name;
  Sizes sizes;
  double rope_theta = 0;  // 0: the family's
  RopeScaling rope_scaling = {};
  void (*also)(Config&) = nullptr;  // sets other members
};

struct ModelFamily {
  const char* name;                 // for --family
  const char *type, *architecture;  // in config.json
  const char* older_architecture = "";
  Config defaults = {};            // of a new model
  std::vector<Field> fields = {};  // in an order in which formulas find what they need
  LocalLayers local = LocalLayers::none;
  Index global_every = 0;                        // n, where most layers are local
  bool global_first = false;                     // the first of n layers is global, not the last
  bool global_last = false;                      // the last layer is always global
  Index usual_window = 4096;                     // of transformers
  bool local_rope = false;                       // only local layers have RoPE
  bool rope_without_window = false;              // ... but all have it if there is no window
  Index attention_every = 0;                     // every n-th layer of a new model has attention; 0: all
  MixerKind other_mixer = MixerKind::attention;  // of the others
  const char* other_type = "";                   // of the others, in config.json
  bool adjusts_mlp = false;                      // config.json may have the width of an MLP without a gate
  bool attention_last = false;                   // if it is too shallow for that, its last layer has attention
  Index without_rope_every = 0;  // every n-th layer has no RoPE, if a file does not list them; 0: all have it
  bool rope_alpha = false;       // dynamic RoPE scaling by "alpha": a larger theta, for all lengths
  bool rope_by_theta = false;    // layers have RoPE only if a file has its theta
  bool theta_by_layer = false;   // a file lists RoPE's theta of each layer, or 0
  bool query_beta = false;  // queries scaled by a factor that grows with the position: "llama_4_scaling_beta" of RoPE
  Modules modules = {};
  std::vector<Published> published = {};
};

}  // namespace streambp
