import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import pruning as original
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

from secateur import ao
from secateur.errors import SecateurError


class FirstRow(ao.BaseSparsifier):
    """Masks the first row, and counts; fails where the group says so."""

    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        module.parametrizations[tensor_name][0].mask[0] = 0
        state = self.state[kwargs["tensor_fqn"]]
        state["count"] = state.get("count", 0) + 1
        if kwargs.get("fail"):
            raise ZeroDivisionError


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), nn.Linear(3, 2))


def mask(model: nn.Module, fqn: str) -> torch.Tensor:
    module, name = fqn.rsplit(".", 1)
    return model.get_submodule(module).parametrizations[name][0].mask


# -- which tensors ------------------------------------------------------------------------------------------


def test_the_base_is_abstract() -> None:
    with pytest.raises(TypeError, match=r"BaseSparsifier.*update_mask"):
        ao.BaseSparsifier()


@pytest.mark.parametrize("kind", ["WeightNormSparsifier", "NearlyDiagonalSparsifier"])
def test_without_config_the_same_tensors_in_the_same_order_as_the_original(kind: str) -> None:
    ours, theirs = getattr(ao, kind)(), getattr(original, kind)()
    ours.prepare(make_model(), None)
    theirs.prepare(make_model(), None)
    names = [group["tensor_fqn"] for group in ours.groups]
    assert names == [group["tensor_fqn"] for group in theirs.groups]
    assert sorted(names) == ["0.weight", "2.0.weight", "2.1.weight", "3.weight"]


def test_a_model_that_is_one_layer_is_configured_too() -> None:
    model = nn.Linear(2, 2)
    sparsifier = FirstRow()
    sparsifier.prepare(model)
    assert [group["tensor_fqn"] for group in sparsifier.groups] == ["weight"]


def test_a_layer_used_twice_is_masked_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    FirstRow().prepare(model)
    assert len(shared.parametrizations.weight) == 1


def test_make_config_takes_other_types() -> None:
    sparsifier = FirstRow()
    sparsifier.make_config_from_model(nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2)), {nn.Embedding})
    assert sparsifier.config == [{"tensor_fqn": "1.weight"}]


@pytest.mark.parametrize(
    "entry",
    [
        lambda model: {"tensor_fqn": "2.0.weight"},
        lambda model: {"tensor_fqn": ".2.0.weight"},
        lambda model: {"module": model[2][0], "tensor_name": "weight"},
        lambda model: {"module_fqn": "2.0", "tensor_name": "weight"},
        lambda model: {
            "tensor_fqn": "2.0.weight",
            "module": model[2][0],
            "module_fqn": "2.0",
            "tensor_name": "weight",
        },
    ],
)
def test_every_way_to_name_a_tensor_gives_the_same_group(entry: Any) -> None:
    model = make_model()
    sparsifier = FirstRow({"a": 1, "b": 2})
    sparsifier.prepare(model, [entry(model) | {"b": 3}])
    expected = {
        "tensor_fqn": "2.0.weight",
        "module_fqn": "2.0",
        "module": model[2][0],
        "tensor_name": "weight",
    }
    assert sparsifier.groups == [{"a": 1, "b": 3} | expected]
    assert type(model[2][0].parametrizations.weight[0]) is ao.FakeSparsity
    assert not is_parametrized(model[0])


BAD = [
    (["0.weight"], AssertionError, "dicts"),
    ([nn.Linear(2, 2)], AssertionError, "dicts"),
    ([{}], AssertionError, "names no tensor"),
    ([{"module": nn.Linear(2, 2), "tensor_name": "weight"}], AssertionError, "not part of the model"),
    ([{"tensor_fqn": "0.weight", "module_fqn": "1"}], AssertionError, "module_fqn"),
    ([{"tensor_fqn": "0.weight", "module": nn.Linear(4, 4)}], AssertionError, "module"),
    ([{"tensor_fqn": "0.wieght"}], AttributeError, r"0\.wieght.*0\.weight"),
    ([{"tensor_fqn": "9.weight"}], AttributeError, r"9\.weight"),
    ([{"tensor_fqn": "0.weight.data"}], AttributeError, "no such"),
    ([{"tensor_fqn": "0.in_features"}], AttributeError, "no such"),
    ([{"tensor_fqn": "0.weight"}, {"tensor_fqn": "0.weight"}], AssertionError, "twice"),
    ([{"tensor_fqn": "0.weight", "mask": torch.ones(4, 3)}], AssertionError, r"0\.weight.*mask"),
    ([{"tensor_fqn": "0.weight", "mask": [1]}], TypeError, r"0\.weight.*mask"),
    ([{"tensor_fqn": "0.weight", "mask": torch.ones(4, 4).double()}], ValueError, r"0\.weight"),
    (7, TypeError, "list of dicts"),
]


@pytest.mark.parametrize(("config", "kind", "words"), BAD)
def test_a_bad_entry_is_named_and_nothing_is_prepared(config: Any, kind: type, words: str, unchanged: Any) -> None:
    model = make_model()
    sparsifier = FirstRow()
    good = [{"tensor_fqn": "3.weight"}, {"tensor_fqn": "2.1.weight"}]
    before = copy.deepcopy(vars(sparsifier))
    with unchanged(model), pytest.raises(kind, match=words) as caught:
        sparsifier.prepare(model, good + config if isinstance(config, list) else config)
    assert isinstance(caught.value, SecateurError)
    assert vars(sparsifier) == before
    sparsifier.prepare(model, good)
    assert len(sparsifier.groups) == 2


def test_a_model_that_is_none_and_defaults_that_are_none() -> None:
    with pytest.raises(TypeError, match="Module") as caught:
        FirstRow().prepare([nn.Linear(2, 2)], None)
    assert isinstance(caught.value, SecateurError)
    with pytest.raises(AssertionError, match="dict") as caught:
        FirstRow([1])
    assert isinstance(caught.value, SecateurError)


def test_defaults_and_config_are_not_shared() -> None:
    defaults: dict[str, Any] = {"nested": [1]}
    first, second = FirstRow(defaults), FirstRow(defaults)
    model = make_model()
    first.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "3.weight"}])
    first.groups[0]["nested"].append(2)
    defaults["nested"].append(3)
    assert (first.groups[1]["nested"], first.defaults["nested"], second.defaults["nested"]) == ([1], [1], [1])
    given = torch.ones(3, 3)
    second.prepare(model, [{"tensor_fqn": "2.1.weight", "mask": given}])
    second.step()
    assert torch.equal(given, torch.ones(3, 3))


def test_two_sparsifiers_may_mask_one_tensor_but_one_may_not_twice(unchanged: Any) -> None:
    model = make_model()
    first = FirstRow()
    first.prepare(model, [{"tensor_fqn": "0.weight"}])
    FirstRow().prepare(model, [{"tensor_fqn": "0.weight"}])
    assert len(model[0].parametrizations.weight) == 2
    with unchanged(model), pytest.raises(SecateurError, match=r"0\.weight: already prepared"):
        first.prepare(model, [{"tensor_fqn": "3.weight"}, {"tensor_fqn": "0.weight"}])
    first.prepare(model, [{"tensor_fqn": "3.weight"}])
    assert [group["tensor_fqn"] for group in first.groups] == ["0.weight", "3.weight"]
    assert len(model[0].parametrizations.weight) == 2


def test_prepare_again_after_squash() -> None:
    model = make_model()
    sparsifier = FirstRow()
    for _ in range(2):
        sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
        sparsifier.step()
        sparsifier.squash_mask()
    assert len(sparsifier.groups) == 1
    assert (model[0].weight[0] == 0).all()


# -- stepping -----------------------------------------------------------------------------------------------


def test_step_updates_unless_switched_off() -> None:
    model = make_model()
    sparsifier = FirstRow()
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    sparsifier.enable_mask_update = False
    sparsifier.step()
    assert mask(model, "0.weight").all()
    sparsifier.enable_mask_update = True
    sparsifier.step()
    assert torch.equal(mask(model, "0.weight")[:, 0], torch.tensor([0.0, 1.0, 1.0, 1.0]))


def test_a_step_that_fails_changes_no_mask_and_no_state(unchanged: Any) -> None:
    model = make_model()
    sparsifier = FirstRow()
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "3.weight", "fail": True}])
    with unchanged(model), pytest.raises(ZeroDivisionError):
        sparsifier.step()
    assert all("count" not in state for state in sparsifier.state.values())


def test_step_after_squash_says_what_to_do() -> None:
    sparsifier = ao.WeightNormSparsifier()
    sparsifier.prepare(make_model(), None)
    sparsifier.squash_mask()
    with pytest.raises(AttributeError, match="prepare") as caught:
        sparsifier.step()
    assert isinstance(caught.value, SecateurError)


# -- making masks final -------------------------------------------------------------------------------------


def test_squash_multiplies_the_mask_in_and_keeps_the_parameter() -> None:
    model = make_model()
    parameter, x = model[0].weight, torch.randn(2, 4)
    sparsifier = FirstRow()
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    expected = model(x)
    sparsifier.squash_mask()
    assert model[0].weight is parameter
    assert type(model[0]) is nn.Linear
    assert (parameter[0] == 0).all()
    assert torch.equal(model(x), expected)
    assert not hasattr(model[0], "sparse_params")


@pytest.mark.parametrize(
    ("everywhere", "per_layer", "first", "last"),
    [
        (("a", "b"), None, {"a": 1, "b": 2}, {"a": 1, "b": 2}),
        (None, {"0": ("a",)}, {"a": 1}, None),
        (("a",), {"3": ("c",)}, {"a": 1}, {"a": 1, "c": 4}),
    ],
)
def test_squash_keeps_settings(everywhere: Any, per_layer: Any, first: Any, last: Any) -> None:
    model = make_model()
    sparsifier = FirstRow({"a": 1, "b": 2, "c": 3})
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "3.weight", "c": 4}])
    sparsifier.squash_mask(params_to_keep=everywhere, params_to_keep_per_layer=per_layer)
    assert getattr(model[0], "sparse_params", None) == first
    assert getattr(model[3], "sparse_params", None) == last


def test_squash_with_an_unknown_setting_changes_nothing(unchanged: Any) -> None:
    model = make_model()
    sparsifier = FirstRow({"a": 1})
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "3.weight"}])
    sparsifier.step()
    with unchanged(model), pytest.raises(KeyError, match=r"0\.weight: no setting 'z'") as caught:
        sparsifier.squash_mask(params_to_keep=("z",))
    assert isinstance(caught.value, SecateurError)
    with unchanged(model), pytest.raises(SecateurError, match=r"3\.weight"):
        sparsifier.squash_mask(params_to_keep_per_layer={"3": ("z",)})


def test_squash_twice_and_half_squashed_models(unchanged: Any) -> None:
    model = make_model()
    sparsifier = FirstRow()
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "3.weight"}])
    sparsifier.step()
    nn.utils.parametrize.remove_parametrizations(model[3], "weight")
    with unchanged(model), pytest.raises(ValueError, match=r"3\.weight") as caught:
        sparsifier.squash_mask()
    assert isinstance(caught.value, SecateurError)


def test_a_squash_that_fails_midway_changes_nothing(unchanged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    sparsifier = FirstRow()
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "3.weight"}])
    sparsifier.step()
    remove = nn.utils.parametrize.remove_parametrizations

    def fail_on_the_second(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        remove(module, *args, **kwargs)
        if module is model[3]:
            raise MemoryError

    monkeypatch.setattr(nn.utils.parametrize, "remove_parametrizations", fail_on_the_second)
    with unchanged(model), pytest.raises(MemoryError):
        sparsifier.squash_mask()


# -- converting ---------------------------------------------------------------------------------------------


class Sparse(nn.Linear):
    @classmethod
    def from_dense(cls, dense: nn.Linear) -> "Sparse":
        new = cls(dense.in_features, dense.out_features)
        new.weight.data = dense.weight.detach().clone()
        return new


@pytest.mark.parametrize("inplace", [True, False])
def test_convert_exchanges_masked_layers_only(inplace: bool) -> None:
    model = make_model()
    calls: list[str] = []
    model[2][0].register_forward_hook(lambda *_: calls.append("hook"))
    model[2][0].register_forward_pre_hook(lambda *_: calls.append("pre"))
    sparsifier = FirstRow()
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "2.0.weight"}])
    sparsifier.step()
    new = sparsifier.convert(model, mapping={nn.Linear: Sparse}, inplace=inplace)
    assert (new is model) == inplace
    assert [type(layer) for layer in (new[0], new[2][0], new[2][1], new[3])] == [
        Sparse,
        Sparse,
        nn.Linear,
        nn.Linear,
    ]
    assert (new[0].weight[0] == 0).all()
    new(torch.ones(1, 4))
    assert calls == ["pre", "hook"]
    if not inplace:
        assert is_parametrized(model[0])


def test_convert_exchanges_a_shared_layer_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    sparsifier = FirstRow()
    sparsifier.prepare(model)
    new = sparsifier.convert(model, {nn.Linear: Sparse})
    assert isinstance(new[0][0], Sparse)
    assert new[0][0] is new[1][0]


def test_convert_refuses_what_it_cannot_do(unchanged: Any) -> None:
    model = make_model()
    sparsifier = FirstRow()
    sparsifier.prepare(model)
    for mapping, kind in ((None, NotImplementedError), ({nn.Linear: nn.ReLU}, AttributeError)):
        with unchanged(model), pytest.raises(kind) as caught:
            sparsifier.convert(model, mapping, inplace=True)
        assert isinstance(caught.value, SecateurError)


# -- saving, copying, printing ------------------------------------------------------------------------------


def test_state_dict_has_the_layout_of_the_original() -> None:
    dicts = []
    for package in (ao, original):
        sparsifier = package.WeightNormSparsifier()
        sparsifier.prepare(make_model(), [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "3.weight"}])
        sparsifier.step()
        dicts.append(sparsifier.state_dict())
    ours, theirs = dicts
    assert ours.keys() == theirs.keys()
    assert ours["groups"] == theirs["groups"]
    assert {name: set(entry) for name, entry in ours["state"].items()} == {
        name: set(entry) for name, entry in theirs["state"].items()
    }


def test_state_goes_through_a_file_into_a_fresh_model(tmp_path: Any) -> None:
    sparsifier = FirstRow({"a": 1})
    sparsifier.prepare(make_model(), [{"tensor_fqn": "0.weight", "a": 5}])
    sparsifier.step()
    torch.save(sparsifier.state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)

    model = make_model()
    fresh = FirstRow()
    fresh.prepare(model, None)
    assert fresh.state != sparsifier.state
    fresh.load_state_dict(saved)
    assert fresh.state == sparsifier.state
    assert fresh.groups == [
        {"tensor_fqn": "0.weight", "a": 5, "module": model[0], "module_fqn": "0", "tensor_name": "weight"}
    ]
    assert torch.equal(mask(model, "0.weight")[:, 0], torch.tensor([0.0, 1.0, 1.0, 1.0]))
    assert "mask" in saved["state"]["0.weight"]  # the caller's dict is left alone
    fresh.step()
    assert fresh.state["0.weight"]["count"] == 2
    fresh.squash_mask()


def test_loading_shares_nothing() -> None:
    models = make_model(), make_model()
    sparsifiers = FirstRow(), FirstRow()
    for sparsifier, model in zip(sparsifiers, models, strict=True):
        sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    sparsifiers[1].load_state_dict(sparsifiers[0].state_dict())
    sparsifiers[0].step()
    assert mask(models[1], "0.weight").all()
    assert "count" not in sparsifiers[1].state["0.weight"]


def test_masks_are_attached_on_loading_where_there_are_none() -> None:
    first, second = FirstRow(), FirstRow()
    first.prepare(make_model(), [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "3.weight"}])
    first.step()
    model = make_model()
    second.prepare(model, [{"tensor_fqn": "0.weight"}])
    second.load_state_dict(first.state_dict())
    assert (model[3].weight[0] == 0).all()
    assert not mask(model, "3.weight")[0].any()


def test_state_dict_follows_a_mask_that_was_replaced() -> None:
    model = make_model()
    sparsifier = FirstRow()
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    model.double()  # replaces the buffers
    sparsifier.step()
    assert not sparsifier.state_dict()["state"]["0.weight"]["mask"][0].any()


def corrupt(change: Any) -> dict[str, Any]:
    sparsifier = FirstRow()
    sparsifier.prepare(make_model(), [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "3.weight"}])
    sparsifier.step()
    state = sparsifier.state_dict()
    change(state)
    return state


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (
            lambda s: s["state"]["3.weight"].update(mask=torch.ones(2, 4)),
            RuntimeError,
            r"3\.weight.*\(2, 4\).*\(2, 3\)",
        ),
        (lambda s: s["state"]["3.weight"].update(mask="no"), RuntimeError, r"3\.weight.*str"),
        (lambda s: s["state"].update({"7.weight": {}}), RuntimeError, r"7\.weight"),
        (lambda s: s["groups"].append({"tensor_fqn": "0.nothing"}), RuntimeError, r"0\.nothing"),
        (lambda s: s["groups"].append({}), KeyError, "tensor_fqn"),
        (lambda s: s.pop("groups"), KeyError, "groups"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change: Any, kind: type, words: str, unchanged: Any) -> None:
    model = make_model()
    sparsifier = FirstRow()
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    groups, state = copy.copy(sparsifier.groups), copy.deepcopy(sparsifier.state)
    with unchanged(model), pytest.raises(kind, match=words) as caught:
        sparsifier.load_state_dict(corrupt(change))
    assert isinstance(caught.value, SecateurError)
    assert (sparsifier.groups, sparsifier.state) == (groups, state)


def test_strict_false_passes_over_what_the_model_lacks() -> None:
    sparsifier = FirstRow()
    sparsifier.prepare(make_model(), [{"tensor_fqn": "0.weight"}])
    state = corrupt(lambda s: (s["state"].update({"7.weight": {}}), s["groups"].append({"tensor_fqn": "7.weight"})))
    sparsifier.load_state_dict(state, strict=False)
    assert [group["tensor_fqn"] for group in sparsifier.groups] == ["0.weight", "3.weight"]


def test_loading_before_prepare_says_so() -> None:
    with pytest.raises(AttributeError, match="prepare") as caught:
        FirstRow().load_state_dict({"state": {}, "groups": []})
    assert isinstance(caught.value, SecateurError)


@pytest.mark.parametrize("norm", [None, 1, torch.abs])
def test_a_deep_copy_works_on_its_own_model(norm: Any) -> None:
    model = make_model()
    sparsifier = ao.WeightNormSparsifier(sparsity_level=0.5, norm=norm)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    ao.LambdaSL(sparsifier, lambda epoch: 1.0)
    twin = copy.deepcopy(sparsifier)
    twin.step()
    assert twin.groups[0]["module"] is twin.model[0]
    assert mask(model, "0.weight").all()
    assert mask(twin.model, "0.weight").mean() == 0.5
    assert twin.state["0.weight"]["mask"] is mask(twin.model, "0.weight")


def test_repr_is_that_of_the_original() -> None:
    texts = []
    for package in (ao, original):
        sparsifier = package.WeightNormSparsifier(0.25, (2, 2))
        texts.append(repr(sparsifier))
        sparsifier.prepare(make_model(), None)
        texts.append(repr(sparsifier))
    assert texts[:2] == texts[2:]
    assert "Group 3" in texts[1]


def test_masks_multiply_with_other_parametrizations() -> None:
    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    model = make_model()
    register_parametrization(model[0], "weight", Double())
    dense = model[0].weight.detach().clone()
    sparsifier = ao.WeightNormSparsifier(sparsity_level=0.5)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    assert (model[0].weight == 0).sum() == 8
    sparsifier.squash_mask()
    kept = model[0].weight != 0
    assert torch.equal(model[0].weight[kept], dense[kept])


def test_state_comparison_tells_masks_apart() -> None:
    from secateur.ao.sparsifier import TensorState

    states = [
        TensorState(),
        TensorState(a=1),
        TensorState(mask=torch.ones(2)),
        TensorState(mask=torch.zeros(2)),
    ]
    for (i, one), (j, two) in itertools.product(enumerate(states), enumerate(copy.deepcopy(states))):
        assert (one == two) == (i == j)
        assert (one != two) == (i != j)
