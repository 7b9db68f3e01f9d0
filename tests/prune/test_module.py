"""A pruned module is still a module: it copies, saves, trains, converts and compiles."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

from secateur import prune


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture
def model():
    net = small_net()
    prune.global_unstructured([(net[0], "weight"), (net[2], "weight")], prune.L1Unstructured, amount=0.5)
    prune.l1_unstructured(net[0], "bias", amount=3)
    return net


X = torch.linspace(-1, 1, 12).view(3, 4)


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_save])
@pytest.mark.parametrize("ran", ["not yet", "with grad", "without grad", "backward"])
def test_a_copy_is_equal_and_independent(model, copied, ran):
    if ran == "without grad":
        with torch.no_grad():
            model(X)
    elif ran != "not yet":
        out = model(X)
        if ran == "backward":
            out.sum().backward()
    other = copied(model)
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other(X), model(X))
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    assert not torch.equal(other(X), model(X))
    other(X).sum().backward()
    assert other[0].weight_orig.grad is not None
    assert prune.is_pruned(prune.l1_unstructured(other[0], "weight", amount=1))


def test_a_copy_is_connected_before_its_first_forward(model):
    other = copy.deepcopy(model)
    other[0].weight.sum().backward()
    assert torch.equal(other[0].weight_orig.grad, other[0].weight_mask)
    assert model[0].weight_orig.grad is None


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
def test_a_module_in_shared_memory_can_be_copied(model, copied):
    model.share_memory()
    model(X)
    assert torch.equal(copied(model)(X), model(X))


def test_a_saved_module_does_not_hold_the_masked_weight_as_well():
    layer = prune.identity(nn.Linear(200, 200, bias=False), "weight")
    layer(torch.ones(1, 200))
    assert len(pickle.dumps(layer)) < 2.2 * 200 * 200 * 4


def test_weight_and_bias_of_one_module(model):
    layer = model[0]
    assert set(dict(layer.named_parameters())) == {"weight_orig", "bias_orig"}
    prune.remove(layer, "weight")
    assert set(dict(layer.named_parameters())) == {"weight", "bias_orig"}
    assert int((layer.bias == 0).sum()) == 3
    prune.remove(layer, "bias")
    assert not prune.is_pruned(layer)
    assert prune.is_pruned(model)


def test_removal_keeps_the_parameter_object_and_the_output(model):
    parameter = model[0].weight_orig
    before = model(X)
    old = model[0].weight
    prune.remove(model[0], "weight")
    assert model[0].weight is parameter
    assert isinstance(model[0].weight, nn.Parameter)
    assert torch.equal(model(X), before)
    with torch.no_grad():
        model[0].weight.add_(1)
    assert not torch.equal(old, model[0].weight)  # what was handed out before is not the parameter's memory


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_training_to_convergence_keeps_pruned_weights_at_zero(model, optimizer):
    options = {"lr": 0.05, "weight_decay": 1e-4} | ({"momentum": 0.9} if optimizer is torch.optim.SGD else {})
    steps = optimizer(model.parameters(), **options)
    torch.manual_seed(1)
    x = torch.randn(64, 4)
    y = x[:, :2].abs()
    masks = [model[0].weight_mask.clone(), model[2].weight_mask.clone()]
    first = None
    for _ in range(200):
        steps.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        steps.step()
        first = first if first is not None else loss.item()
    assert loss.item() < 0.3 * first, (loss.item(), first)
    model(x)
    for layer, mask in zip((model[0], model[2]), masks, strict=True):
        assert torch.equal(layer.weight_mask, mask)
        assert bool((layer.weight[mask == 0] == 0).all())
        prune.remove(layer, "weight")
        assert bool((layer.weight[mask == 0] == 0).all())


@pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.bfloat16, lambda m: m.to(torch.float16)])
def test_conversion(model, convert):
    model(X)
    convert(model)
    dtype = model[0].weight_orig.dtype
    out = model(X.to(dtype))
    assert out.dtype == dtype == model[0].weight_mask.dtype
    assert int((model[0].weight == 0).sum()) == int((model[0].weight_mask == 0).sum())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
class TestRecurrent:
    def rnn(self, kind):
        torch.manual_seed(0)
        return kind(4, 6, num_layers=2, batch_first=True)

    def test_runs_trains_copies_and_is_restored_without_a_warning(self, kind):
        rnn = self.rnn(kind)
        x = torch.randn(2, 5, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for name in ("weight_ih_l0", "weight_hh_l1"):
                prune.l1_unstructured(rnn, name, 0.5)
            optimizer = torch.optim.SGD(rnn.parameters(), lr=0.1)
            for _ in range(2):
                rnn(x)[0].sum().backward()
                optimizer.step()
            out = rnn(x)[0]
            other = copy.deepcopy(rnn)
            assert torch.equal(other(x)[0], out)
            assert rnn._flat_weights[0] is rnn.weight_ih_l0
            assert other._flat_weights[0] is other.weight_ih_l0
            for name in ("weight_ih_l0", "weight_hh_l1"):
                prune.remove(rnn, name)
            assert torch.equal(rnn(x)[0], out)
        assert all(isinstance(w, nn.Parameter) for w in rnn._flat_weights)

    def test_its_flat_weights_are_never_stale(self, kind):
        rnn = prune.l1_unstructured(self.rnn(kind), "weight_ih_l0", 0.5)
        plain = self.rnn(kind)
        x = torch.randn(2, 5, 4)
        with torch.no_grad():
            rnn(x)
            rnn.weight_ih_l0_orig.data.mul_(2)
            plain.weight_ih_l0.copy_(rnn.weight_ih_l0_orig * rnn.weight_ih_l0_mask)
            torch.testing.assert_close(rnn(x)[0], plain(x)[0])
            rnn.double()
            torch.testing.assert_close(rnn(x.double())[0], plain.double()(x.double())[0])


class TestCompiled:
    @pytest.fixture(autouse=True)
    def _forget(self):
        torch.compiler.reset()  # what was compiled before

    @pytest.mark.parametrize("ran", [False, True])
    def test_compile(self, model, ran):
        if ran:
            model(X)
        expected = model(X)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(X), expected)
        compiled(X).sum().backward()
        assert bool((model[0].weight_orig.grad[model[0].weight_mask == 0] == 0).all())
        with torch.no_grad():
            model[0].weight_orig.mul_(2)
            torch.testing.assert_close(compiled(X), model(X))

    @pytest.mark.filterwarnings("ignore:The tensor attribute", "ignore:While compiling")
    @pytest.mark.parametrize("strict", [False, True])
    def test_export(self, model, strict):
        model(X)
        program = torch.export.export(model, (X,), strict=strict)
        torch.testing.assert_close(program.module()(X), model(X))
        assert "0.weight_mask" in program.state_dict
        assert torch.equal(model(X), copy.deepcopy(model)(X))  # the module itself is not left with fake tensors

    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
    def test_jit_trace_records_the_product(self, model):
        model(X)
        traced = torch.jit.trace(model, X)
        assert torch.equal(traced(X), model(X))
        assert "aten::mul" in str(traced.inlined_graph)


class TestStateDicts:
    def test_round_trip_with_a_prefix(self, model):
        saved = {"module." + k: v.clone() for k, v in model.state_dict().items()}
        other = small_net()
        for layer, name in ((other[0], "weight"), (other[2], "weight"), (other[0], "bias")):
            prune.identity(layer, name)
        with torch.no_grad():
            other(X)
        other.load_state_dict({k.removeprefix("module."): v for k, v in saved.items()})
        assert torch.equal(other(X), model(X))

    def test_distributed_data_parallel(self, model, tmp_path):
        from torch import distributed

        store = distributed.FileStore(str(tmp_path / "store"), 1)
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            parallel = nn.parallel.DistributedDataParallel(model)
            optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                parallel(X).sum().backward()
                optimizer.step()
            saved = copy.deepcopy(parallel.state_dict())
            parallel.load_state_dict(saved)
        finally:
            distributed.destroy_process_group()
        assert "module.0.weight_mask" in saved
        model(X)
        assert torch.equal(model[0].weight, saved["module.0.weight_orig"] * saved["module.0.weight_mask"])
