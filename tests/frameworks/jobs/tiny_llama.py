"""A Llama of a few kilobytes, and its tokens of each step."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=4))


def tokens_of(step: int) -> torch.Tensor:
    """The rows of all ranks."""
    return torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(step))
