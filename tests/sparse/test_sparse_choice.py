"""Which weights get zeros, and along what: embeddings, kernels without several inputs, advice that can be followed."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import secateur as sec
from secateur.errors import PlanError
from secateur.sparse.problem import Problem

METHODS = (sec.ADMM(), sec.SparseGPT(), sec.Wanda(), sec.RIA(), sec.Magnitude())


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.inner(self.words(x).mean(1))))


def _tokens() -> list[Tensor]:
    return [torch.randint(40, (32, 5), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def _words() -> _Words:
    torch.manual_seed(0)
    return _Words()


@pytest.mark.parametrize("pattern", [sec.Unstructured(0.5), sec.NM(2, 4), sec.Block(4, 1)], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_an_embedding_gets_zeros_if_it_is_asked_for(method: Any, pattern: Any) -> None:
    net, dense = _words(), _words()
    report = sec.sparsify(net, _tokens(), pattern, method=method, include="words")
    assert [layer.name for layer in report.layers] == ["words.weight", "inner.weight"]
    table, before = net.words.weight.detach(), dense.words.weight.detach()
    kept = table != 0
    assert float(kept.float().mean()) == 0.5
    assert torch.equal(kept, pattern.mask(before.abs()))
    assert torch.equal(table[kept], before[kept])  # nothing can make up for an entry
    gone = float((before - table).square().sum() / before.square().sum())
    assert (report.layers[0].before, report.layers[0].after) == (0, pytest.approx(gone, rel=1e-4))


def test_layers_behind_an_embedding_are_solved_with_its_zeros() -> None:
    net, dense, batches = _words(), _words(), _tokens()
    sec.sparsify(net, batches, sec.NM(2, 4), include="words")
    with torch.no_grad():
        inputs = torch.cat([net.words(batch).mean(1) for batch in batches])
        wanted = torch.cat([dense.words(batch).mean(1) for batch in batches]) @ dense.inner.weight.T
        inner = sec.ADMM()(Problem.of(dense.inner.weight, inputs, wanted), sec.NM(2, 4))[0]
    assert torch.allclose(net.inner.weight, inner, atol=1e-3)


def test_an_embedding_is_left_alone_and_said() -> None:
    net = _words()
    report = sec.sparsify(net, _tokens(), sec.NM(2, 4))
    assert report.left_alone == {"head.weight": "the head", "words.weight": "an embedding"}
    assert torch.equal(net.words.weight, _words().words.weight)


def test_what_is_protected_is_said() -> None:
    report = sec.sparsify(_words(), _tokens(), sec.NM(2, 4), protect="inner", include="head")
    assert report.left_alone == {"inner.weight": "protected", "words.weight": "an embedding"}


def test_all_but_the_layers_of_the_report_is_bit_for_bit_as_it_was() -> None:
    """Norms, biases, head and embedding, tied or not."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 40}
    for tied in (True, False):
        torch.manual_seed(0)
        config = LlamaConfig(**sizes, num_attention_heads=2, attention_bias=True, tie_word_embeddings=tied)
        model = LlamaForCausalLM(config).eval()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        report = sec.sparsify(model, [{"input_ids": batch} for batch in _tokens()], sec.NM(2, 4))
        changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
        assert changed == {layer.name for layer in report.layers}
        assert len(changed) == 7
        assert "an embedding" in report.left_alone.values()


def _convolutions(*parts: nn.Module, inputs: int) -> tuple[nn.Sequential, list[Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(3))
    batch = torch.randn(8, inputs, 9, 9)
    net(batch)
    return net.eval(), [batch]


@pytest.mark.parametrize(
    ("parts", "inputs"),
    [
        ((nn.Conv2d(8, 8, 4, groups=8),), 8),
        ((nn.Conv2d(1, 8, 4),), 1),
        ((nn.ConvTranspose2d(8, 8, 4, groups=8),), 8),
    ],
    ids=["depthwise", "one channel", "transposed"],
)
def test_rows_of_a_kernel_are_no_inputs(parts: tuple[nn.Module, ...], inputs: int) -> None:
    """Four places of a kernel are no four inputs: a kernel of one input cannot be 2:4."""
    net, batches = _convolutions(*parts, inputs=inputs)
    with pytest.raises(PlanError, match=r"0.weight: its 1 inputs are no multiple of 4"):
        sec.sparsify(net, batches, sec.NM(2, 4))
    with pytest.raises(PlanError, match=r"0.weight: 8×1 is not made of blocks of 2×2"):
        sec.sparsify(net, batches, sec.Block(2, 2))
    sec.sparsify(net, batches, sec.Unstructured(0.5))
    assert int((net[0].weight == 0).sum()) == 64


def test_the_advice_names_all_that_does_not_fit_and_no_more() -> None:
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1)) for _ in range(12)]
    net, batches = _convolutions(nn.Conv2d(3, 8, 1), *blocks, inputs=3)
    with pytest.raises(PlanError, match="does not fit 13 weights") as refused:
        sec.sparsify(net, batches, sec.NM(2, 4), method=sec.Magnitude())
    advice = re.search(r"protect=\(.*,\)$", str(refused.value))
    assert advice is not None
    protect = eval(advice[0].removeprefix("protect="))
    assert protect == ("0.weight", *(f"{i}.0.weight" for i in range(1, 13)))
    report = sec.sparsify(net, batches, sec.NM(2, 4), method=sec.Magnitude(), protect=protect)
    assert [layer.name for layer in report.layers] == [f"{i}.1.weight" for i in range(1, 13)]


def test_a_tied_embedding_is_solved_once_and_before_what_reads_it() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 40}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True)).eval()
    batches = [{"input_ids": batch} for batch in _tokens()]
    report = sec.sparsify(model, batches, sec.NM(2, 4), include="*embed_tokens*")
    assert report.layers[0].name == "model.embed_tokens.weight"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert ((model.lm_head.weight.view(-1, 4) != 0).sum(1) == 2).all()
    assert len(report.layers) == 8
