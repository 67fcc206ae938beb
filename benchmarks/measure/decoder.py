"""Decoders of transformers with random weights, and greedy decoding with them, a token at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from cuda_graph import capture_step
from torch import Tensor, nn

PROMPT = 8  # tokens that are given


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder."""

    width: int
    neurons: int
    layers: int
    heads: int
    vocabulary: int


def build_model(kind: str, shape: Shape, dtype: torch.dtype, device: str) -> nn.Module:
    """Return a decoder with random weights, with one kernel for each norm and activation."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    common = {"vocab_size": shape.vocabulary, "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "sdpa"}
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            if kind == "gpt2":
                config = GPT2Config(
                    n_embd=shape.width, n_inner=shape.neurons, n_layer=shape.layers, n_head=shape.heads,
                    activation_function="gelu_pytorch_tanh", **common,
                )  # fmt: skip
                return GPT2LMHeadModel(config).eval().requires_grad_(False)
            sizes = {"num_hidden_layers": shape.layers, "num_attention_heads": shape.heads}
            config = LlamaConfig(
                hidden_size=shape.width, intermediate_size=shape.neurons, tie_word_embeddings=True, **sizes, **common
            )
            model = LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            norm = nn.RMSNorm(shape.width, module.variance_epsilon, dtype=dtype, device=device)
            norm.weight = module.weight
            model.set_submodule(name, norm)
    return model


@contextmanager
def compiled_functions(kind: str, device: str) -> Iterator[None]:
    """Let Llama compute its rotations and SwiGLU in one kernel each on a GPU, whatever the format of its weights."""
    if kind != "llama" or device != "cuda":
        yield
        return
    from transformers.models.llama import modeling_llama as llama

    rotate, forward = llama.apply_rotary_pos_emb, llama.LlamaMLP.forward
    multiply = torch.compile(lambda gate, up: nn.functional.silu(gate) * up, dynamic=False)

    def forward_with_one_kernel(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(multiply(self.gate_proj(x), self.up_proj(x)))

    llama.apply_rotary_pos_emb = torch.compile(rotate, dynamic=False)
    llama.LlamaMLP.forward = forward_with_one_kernel
    try:
        yield
    finally:
        llama.apply_rotary_pos_emb, llama.LlamaMLP.forward = rotate, forward


class StepCache:
    """The keys and values of some sequences in tensors of a fixed size, to which a step writes at its position."""

    def __init__(self, position: Tensor, context: int) -> None:
        self.position, self.context = position, context
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Write the keys and values of one token; return those of all places."""
        if layer not in self.stored:
            self.stored[layer] = tuple(x.new_zeros(*x.shape[:2], self.context, x.shape[3]) for x in (keys, values))
        for all_places, new in zip(self.stored[layer], (keys, values), strict=True):
            all_places.index_copy_(2, self.position, new)
        return self.stored[layer]


class Decoder:
    """Greedy decoding of some sequences, a token of each at a time; on a GPU a step is replayed from a CUDA graph."""

    def __init__(self, model: nn.Module, batch: int, context: int) -> None:
        self.model, device = model, model.device
        self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.cache = StepCache(self.position, context)
        self.places = torch.arange(context, device=device)
        self.logits = torch.zeros(batch, model.config.vocab_size, dtype=model.dtype, device=device)
        self.step = self.compute_step
        if device.type == "cuda":
            self.step = capture_step(self.compute_step)

    def compute_step(self) -> None:
        """Read one token of each sequence, and choose the next ones."""
        hidden = torch.zeros_like(self.places, dtype=self.logits.dtype)
        hidden = hidden.masked_fill_(self.places > self.position, -torch.inf).view(1, 1, 1, -1)
        inputs = {"input_ids": self.tokens, "position_ids": self.position.view(1, 1), "attention_mask": hidden}
        logits = self.model(**inputs, past_key_values=self.cache, use_cache=True).logits[:, -1]
        self.logits.copy_(logits)
        self.tokens.copy_(logits.argmax(-1, keepdim=True))
        self.position += 1

    def decode(self, prompt: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return so many tokens after a prompt, batch × count, and their logits, batch × count × vocabulary."""
        self.position.zero_()
        tokens, logits = [], []
        for place in range(prompt.shape[1] + count - 1):
            if place < prompt.shape[1]:
                self.tokens.copy_(prompt[:, place : place + 1])
            self.step()
            if place >= prompt.shape[1] - 1:
                tokens.append(self.tokens.clone())
                logits.append(self.logits.clone())
        return torch.cat(tokens, 1), torch.stack(logits, 1)

    def run_steps(self, count: int) -> None:
        """Decode so many tokens behind the prompt."""
        self.position.fill_(PROMPT)
        for _ in range(count):
            self.step()
