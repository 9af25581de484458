"""Support for transformers in an exported model: its config class, model class and key-value cache.

artifact/model_code.py puts this code below the code of a model, so that transformers loads an exported folder without Ingot.
A model counts positions from the first column, so a batch may be padded on the right, but not on the left.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

Model: Any = nn.Module  # the class of the exported model


class IngotConfig(PretrainedConfig):
    """The config of an exported model: arguments of Model's constructor (`settings`, `extra`) and of its `set` (`stages`)."""

    model_type = "ingot"

    def __init__(self, settings: Any = None, extra: Any = None, stages: Any = None, **kwargs: Any):
        self.settings, self.extra, self.stages = settings or {}, extra or {}, stages or []
        super().__init__(**kwargs)


class IngotCache:
    """The key-value cache of all layers."""

    is_compileable = False

    def __init__(self, layers: list[Any]):
        self.layers, self.length = layers, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached tokens per row."""
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows of the cache, for beam search."""
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[beam_idx], layer.values[beam_idx]


def cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Cast the output of a module, as a forward hook."""
    return output.to(dtype)


class IngotForCausalLM(PreTrainedModel, GenerationMixin):
    """A model trained by Ingot."""

    config_class = IngotConfig
    base_model_prefix = "model"

    def __init__(self, config: Any):
        super().__init__(config)
        parameters = inspect.signature(Model).parameters.values()
        names = {p.name for p in parameters}
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        given = {name: value for name, value in config.settings.items() if takes_all or name in names}
        with torch.device("cpu"):  # from_pretrained builds on the meta device, but rotary tables and buffers need values
            self.model = Model(**given, **config.extra)
        for numbers in config.stages:
            self.model.set(**numbers)
        self.context = getattr(self.model, "context", None) or config.max_position_embeddings
        self.caches = all(hasattr(self.model, name) for name in ("new_cache", "hidden", "logits"))
        for module in self.model.modules():
            if isinstance(module, nn.Embedding) and module.weight.dtype != torch.get_default_dtype():
                # from_pretrained loads all weights in one dtype, but the dtype of the embedding is that of the residual stream.
                module.register_forward_hook(partial(cast_output, module.weight.dtype))
            module.fixed_buffers = {name: module.get_buffer(name).clone() for name in module._non_persistent_buffers_set}
        first: dict[Any, str] = {}  # tied parameters are stored once, under their first name
        named = self.model.named_parameters(remove_duplicate=False)
        tied = {name: first[p] for name, p in named if first.setdefault(p, name) != name}
        self._tied_weights_keys = {f"model.{name}": f"model.{source}" for name, source in tied.items()}
        config.tie_word_embeddings = bool(tied)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        for name, value in getattr(module, "fixed_buffers", {}).items():  # from_pretrained drops the values of these buffers
            module.get_buffer(name).copy_(value)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the model has its own cache

    def get_input_embeddings(self) -> Any:
        """Return the token embedding."""
        return next((module for module in self.model.modules() if isinstance(module, nn.Embedding)), None)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: IngotCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> Any:
        """Return logits (B, T, V) and, if requested, the loss of `labels` (-100: ignored) and the key-value cache."""
        cache, model = past_key_values, self.model
        if cache is not None and not isinstance(cache, IngotCache):
            raise ValueError("past_key_values must come from an earlier output of this model; leave it out in the first call")
        mask = attention_mask
        if mask is not None and not (mask.dim() == 2 and mask[:, 0].all() and (mask[:, 1:] <= mask[:, :-1]).all()):
            raise ValueError("attention_mask must be ones, then zeros: pad on the right, or generate for one prompt at a time")
        rotation = getattr(model, "rotation", None)
        if rotation is not None and rotation._cos.device != input_ids.device:
            rotation._fill(input_ids.device)
        if cache is None and use_cache and self.caches:
            cache = IngotCache(model.new_cache(len(input_ids)))
        if not self.caches:
            x = model(input_ids)
        else:
            x = model.hidden(input_ids) if cache is None else model.hidden(input_ids, cache.layers)
        if cache is not None:
            cache.length += input_ids.size(1)
        x = x[:, -logits_to_keep:]
        logits = model.logits(x) if self.caches else x
        loss = None
        if labels is not None:
            items = kwargs.get("num_items_in_batch")
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.size(-1), num_items_in_batch=items)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the inputs of the next forward pass: the tokens not yet cached or, if the context is full, the last ones."""
        if input_ids.size(1) > self.context:  # each new token now shifts the positions of all others
            mask = attention_mask if attention_mask is None else attention_mask[:, -self.context :]
            return {"input_ids": input_ids[:, -self.context :], "attention_mask": mask, "use_cache": False, "logits_to_keep": 1}
        start = past_key_values.get_seq_length() if past_key_values is not None else 0
        inputs = {"input_ids": input_ids[:, start:], "past_key_values": past_key_values, "attention_mask": attention_mask}
        return {**inputs, "use_cache": use_cache, "logits_to_keep": 1}
