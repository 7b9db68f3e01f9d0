"""Real architectures, in rounds and taken up again."""

import pytest
import timm
import torch
from schedule_models import digest

import secateur as sec
from secateur.schedule import cut, iterate, linear

MODELS = {
    "resnet10t": {},
    "vit_tiny_patch16_224": {"img_size": 32, "depth": 2},
}


def build(name):
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=10, **MODELS[name]).eval()


@pytest.mark.parametrize("name", ["resnet10t", pytest.param("vit_tiny_patch16_224", marks=pytest.mark.slow)])
def test_rounds_end_at_the_shapes_of_one_cut_also_when_taken_up_again(name, tmp_path):
    example = torch.randn(1, 3, 32, 32)
    whole, stopped, taken_up, at_once = (build(name) for _ in range(4))

    def fit(model, step):
        """Moves every weight a little, so that scores and statistics change between rounds."""
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)), alpha=0.01)

    def stop(model, step):
        if step == 2:
            raise KeyboardInterrupt
        fit(model, step)

    def run(model, fit, folder):
        asked = {"evaluate": lambda m: 1.0, "schedule": linear(2), "checkpoint": folder}
        return iterate(model, example, sec.Ratio(0.5), fit=fit, **asked)

    found = run(whole, fit, None)
    cut(at_once, example, sec.Ratio(0.5))
    shapes = [{n: t.shape for n, t in model.state_dict().items()} for model in (whole, at_once)]
    assert shapes[0] == shapes[1]
    assert found.rounds[2].macs == sec.macs(at_once, example) < found.rounds[1].macs < found.rounds[0].macs
    with pytest.raises(KeyboardInterrupt):
        run(stopped, stop, tmp_path)
    assert run(taken_up, fit, tmp_path) == found
    assert digest(taken_up) == digest(whole)
    assert torch.equal(taken_up(example), whole(example))
