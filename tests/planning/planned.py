"""Print what planning says of some models: run by a test in processes that hash differently."""

import torchvision_ops  # noqa: F401  before anything imports torchvision

# isort: split
import torch
from torch import nn
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

import secateur as sec

IDS = {"input_ids": torch.arange(6)[None]}


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    bloom = BloomForCausalLM(BloomConfig(**sizes)).eval()
    graph = sec.trace(bloom, IDS, variants=False)
    print(graph, [*map(str, graph.equations.held_now)])
    try:
        sec.plan(graph, sec.Params(0.75), loadable=True)
    except sec.PlanError as error:
        print(error)
    llama = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48, num_key_value_heads=2)).eval()
    graph = sec.trace(llama, IDS)
    print(graph, sec.rotations(graph))
    for loadable in (False, True):
        print(sec.plan(graph, sec.Macs(0.7), importance=sec.FPGM(), loadable=loadable).to_json())
    net = nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 8, 1), nn.Flatten(), nn.Linear(288, 5)
    ).eval()
    images = torch.randn(8, 3, 8, 8)
    print(sec.compress(net, images[:1], sec.Params(0.6), [images, images.flip(0)], timed=False).plan.to_json())


if __name__ == "__main__":
    main()
