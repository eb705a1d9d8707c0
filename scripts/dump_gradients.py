"""Record one training step of any PyTorch trainer, to have its gradient judged:

  streambp verify --model DIR --batch step.batch.*.safetensors --against step.gradient.safetensors

In a training loop, before the first forward pass of the step:

  from dump_gradients import StepRecorder
  StepRecorder(model, optimizer, "step")

With the Trainer of transformers or TRL:

  trainer.add_callback(record_callback("step"))

The recorder keeps what the model is called with (input_ids, labels, attention_mask, position_ids, ...). When the
optimizer steps, it writes these micro-batches, in a file per rank, and the gradient as the optimizer sees it, and removes
itself. DIR must hold the weights of this moment: save the model before the step, or record the first step from it.

Gradients that are already clipped are recognised; without clipping (max_grad_norm=0) they are easier to read. Of a model
that is too large, record a part: names=["layers.0.", "norm"] keeps the parameters with one of these in their names.
A trainer that computes its loss outside the model gives the labels itself: recorder.add(input_ids=..., labels=...).
"""

import inspect
import json
import os
import struct
import warnings

import torch
import torch.distributed as dist

TYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
         torch.int32: "I32", torch.bool: "BOOL"}
INPUTS = {"input_ids": "input_ids", "labels": "labels", "attention_mask": "attention_mask",
          "position_ids": "position_ids", "cu_seq_lens_q": "cu_seqlens", "loss_weights": "loss_weights"}


def write_safetensors(path, tensors, metadata):
    header, end = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path + ".tmp", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    os.replace(path + ".tmp", path)


class StepRecorder:
    def __init__(self, model, optimizer, path, names=None, reduction="mean"):
        self.model, self.path, self.names, self.reduction = model, path, names, reduction
        self.batches, self.given, self.computed_in, self.began_with = [], [], set(), "zero"
        inner = getattr(model, "module", model)  # of DDP, of PEFT
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        self.arguments = list(inspect.signature(inner.forward).parameters)
        leaves = [module for module in model.modules() if list(module.parameters(recurse=False))]
        self.hooks = [model.register_forward_pre_hook(self._called, with_kwargs=True),
                      optimizer.register_step_pre_hook(lambda *_: self.write())]
        self.hooks += [leaf.register_forward_hook(self._computed) for leaf in leaves]
        config = inner.config.to_dict() if hasattr(getattr(inner, "config", None), "to_dict") else {}
        rates = [value for name, value in config.items()  # of functional dropout
                 if name.endswith(("dropout", "pdrop")) and isinstance(value, float)]
        rates += [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
        if any(rate > 0 for rate in rates):
            warnings.warn("the model has dropout, so its gradient is random; set it to 0 to compare gradients")

    def add(self, **tensors):
        """Gives a micro-batch that the model is called with in another form."""
        self.given.append({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()})

    def _called(self, _, args, kwargs):
        if not torch.is_grad_enabled():
            return
        if not self.batches:
            grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            self.began_with = "a gradient" if any(bool((grad != 0).any()) for grad in grads) else "zero"
        inputs = dict(zip(self.arguments, args), **kwargs)
        found = {INPUTS[name]: value.detach().cpu().to(torch.float64 if name == "loss_weights" else torch.int64)
                 for name, value in inputs.items() if name in INPUTS and torch.is_tensor(value)}
        self.batches.append(found)

    def _computed(self, _, __, output):
        if torch.is_tensor(output):
            tf32 = output.is_cuda and torch.backends.cuda.matmul.allow_tf32 and output.dtype == torch.float32
            self.computed_in.add("tf32" if tf32 else str(output.dtype).removeprefix("torch."))

    def write(self):
        for hook in self.hooks:
            hook.remove()
        batches = self.given or self.batches
        if not batches:
            raise ValueError("the model was not called since the recorder was made; make it before the first forward pass")
        if any("labels" not in batch for batch in batches):
            raise ValueError("the model was called without labels; give each micro-batch with recorder.add(input_ids=..., "
                             "labels=...), where labels are -100 for tokens that are not learned")
        if any("attention_mask" in batch and batch["attention_mask"].dim() > 2 for batch in batches):
            raise ValueError("attention_mask has more than two dimensions; give documents as position_ids, or use add()")
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        tensors = {f"{i}.{name}": tensor for i, batch in enumerate(batches) for name, tensor in batch.items()}
        write_safetensors(f"{self.path}.batch.rank{rank}.safetensors", tensors, {"reduction": self.reduction})
        gradients = {}
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad or (self.names and not any(part in name for part in self.names)):
                continue
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if hasattr(gradient, "full_tensor"):  # FSDP: all ranks must take part
                gradient = gradient.full_tensor()
            if rank == 0:
                gradients[name] = gradient
        if rank == 0:
            summed_in = {str(gradient.dtype).removeprefix("torch.") for gradient in gradients.values()}
            write_safetensors(f"{self.path}.gradient.safetensors", gradients,
                              {"computed_in": " ".join(sorted(self.computed_in)), "summed_in": " ".join(sorted(summed_in)),
                               "began_with": self.began_with})


def record_callback(path, **options):
    """A callback for the Trainer of transformers and TRL: records the first step."""
    from transformers import TrainerCallback

    class Record(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
            StepRecorder(model, getattr(optimizer, "optimizer", optimizer), path, **options)

    return Record()
