"""Example inputs of a model: a batch, the shape of one sample, or everything that its forward takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import PomonaError, require

# A batch; the shape of one sample; several positional arguments; or keyword arguments, as Hugging Face's models take.
Example = Tensor | PackedSequence | Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class ModelInputs:
    """The arguments of one call of a model."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_example(cls, model: nn.Module, example: Example | Self) -> Self:
        """Return the arguments that an example stands for. Raise PomonaError where it has no tensor."""
        if isinstance(example, cls):
            return example
        if isinstance(example, Mapping):
            inputs = cls(kwargs=dict(example))
        elif isinstance(example, (Tensor, PackedSequence)):
            inputs = cls((example,))
        elif isinstance(example, (list, tuple)) and not all(isinstance(part, (int, float)) for part in example):
            inputs = cls(tuple(example))
        else:
            inputs = cls((make_example_batch(model, example),))
        require(bool(inputs.tensors), f"an example needs a tensor, got {example!r}.")
        return inputs

    def call(self, model: Callable[..., Any]) -> Any:
        """Return the outputs of a model, or of one of its layers, for these arguments."""
        return model(*self.args, **self.kwargs)

    def run(self, model: nn.Module) -> Any:
        """Return the outputs of a model for these arguments; raise PomonaError where it does not take them."""
        try:
            return self.call(model)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            shape, name = tuple(self.tensors[0].shape), type(model).__name__
            raise PomonaError(f"{name} does not run on samples of shape {shape[1:]}: {reason}") from error

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> ModelInputs:
        """Return these arguments with a function applied to each tensor."""
        args, kwargs = tree_map_only(Tensor, function, (self.args, self.kwargs))
        return ModelInputs(args, kwargs)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, also in sequences and dictionaries."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    @property
    def batch(self) -> int:
        """The number of samples: the length of the first tensor that has one, or 1."""
        return next((len(tensor) for tensor in self.tensors if tensor.ndim), 1)

    @property
    def device(self) -> torch.device:
        """The device of the first tensor."""
        return self.tensors[0].device


def is_shape(example: Example) -> bool:
    """Return whether an example is the shape of one sample."""
    return not isinstance(example, (Tensor, Mapping)) and all(isinstance(part, (int, float)) for part in example)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Let a model of Hugging Face neither keep nor return the keys and values of its attention."""
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    caching = [config for config in configs if getattr(config, "use_cache", False)]
    try:
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for config in caching:
            config.use_cache = True


def make_example_batch(model: nn.Module, shape: Any) -> Tensor:
    """Return a batch of one sample of zeros, with the device and dtype of the model, or token ids for an embedding."""
    valid = isinstance(shape, Sequence) and all(type(n) is int and n > 0 for n in shape)
    message = f"input_shape takes the shape of one sample, such as (3, 32, 32), or a tensor, got {shape!r}."
    require(valid and not isinstance(shape, str), message)
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    like = tensors[0] if tensors else torch.empty(())
    first = next((m for m in model.modules() if any(True for _ in m.parameters(recurse=False))), model)
    tokens = isinstance(first, nn.Embedding | nn.EmbeddingBag)
    return torch.zeros(1, *shape, device=like.device, dtype=torch.long if tokens else like.dtype)
