"""A checkpoint cut in its files is, bit for bit, what the model saves after `apply`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import secateur as sec
from secateur.io import checkpoint

SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = dict(SMALL, intermediate_size=24, moe_intermediate_size=16, head_dim=8)
EXAMPLE = {"input_ids": torch.arange(6)[None]}


def llama(**more):
    return LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=48, **more))


def deepseek():
    heads = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(**{**EXPERTS, "num_key_value_heads": 4}, **heads, **experts, first_k_dense_replace=1)
    )


MODELS = {
    "llama": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "qwen3 moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS, num_experts=4, num_experts_per_tok=2)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, intermediate_size=24, num_local_experts=4)),
    "deepseek v3": deepseek,
}


def stored(folder):
    """Every tensor of a checkpoint."""
    return {name: t for file in sorted(Path(folder).glob("*.safetensors")) for name, t in load_file(file).items()}


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name


def planned(model, ratio=0.5):
    return sec.plan(sec.trace(model, EXAMPLE, variants=False), sec.Ratio(ratio), importance=sec.Random(3))


def plainly_saved(model, folder):
    """As Transformers itself saves it."""
    type(model).save_pretrained.__wrapped__(model, folder)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.bfloat16) for kind in MODELS), ("llama", torch.float32)], ids=str
)
def test_the_files_are_what_apply_makes(tmp_path, kind, dtype):
    model = MODELS[kind]().eval()
    plan = sec.Plan.from_json(planned(model).to_json())
    model = model.to(dtype)
    model.save_pretrained(tmp_path / "whole", max_shard_size="20kB")
    (tmp_path / "whole" / "tokenizer.json").write_text("{}")
    (tmp_path / "whole" / "pytorch_model.bin").write_text("full size")
    before = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    assert sec.cut_checkpoint(tmp_path / "whole", plan, tmp_path / "small") == tmp_path / "small"
    plainly_saved(sec.apply(model, plan, verify=False), tmp_path / "reference")

    same(stored(tmp_path / "small"), stored(tmp_path / "reference"))
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    names = {file.name for file in (tmp_path / "small").iterdir()}
    assert {"config.json", "tokenizer.json", "secateur.json", "model.safetensors.index.json"} <= names
    assert "pytorch_model.bin" not in names
    assert sec.Plan.from_json((tmp_path / "small" / "secateur.json").read_text()) == plan


def test_the_index_says_where_each_tensor_is(tmp_path):
    model = MODELS["qwen3 moe"]().eval()
    plan = planned(model)
    model.save_pretrained(tmp_path / "whole", max_shard_size="20kB")
    sec.cut_checkpoint(tmp_path / "whole", plan, tmp_path / "small")
    index = json.loads((tmp_path / "small" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "small" / file, framework="pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
            assert opened.metadata() == {"format": "pt"}
    tensors = stored(tmp_path / "small")
    assert set(tensors) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    experts = {name.split(".experts.")[1].split(".")[0] for name in tensors if ".experts." in name}
    assert experts == {str(i) for i in range(len(experts))}


def test_the_result_runs_in_a_model_that_the_plan_cut(tmp_path):
    """Load the files into a model that was cut with random weights: it puts out what the applied one does."""
    model = MODELS["llama, tied"]().eval()
    plan = planned(model)
    model.save_pretrained(tmp_path / "whole", max_shard_size="20kB")
    sec.cut_checkpoint(tmp_path / "whole", plan, tmp_path / "small")
    fresh = sec.apply(MODELS["llama, tied"]().eval(), plan, verify=False)
    missing, unexpected = fresh.load_state_dict(stored(tmp_path / "small"), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    sec.apply(model, plan)
    assert torch.equal(fresh(**EXAMPLE).logits, model(**EXAMPLE).logits)


def test_a_checkpoint_is_cut_twice(tmp_path):
    model = llama().eval()
    model.save_pretrained(tmp_path / "whole")
    first = planned(model, 0.25)
    sec.cut_checkpoint(tmp_path / "whole", first, tmp_path / "once")
    sec.apply(model, first, verify=False)
    second = planned(model, 0.5)
    sec.cut_checkpoint(tmp_path / "once", second, tmp_path / "twice")
    plainly_saved(sec.apply(model, second, verify=False), tmp_path / "reference")
    same(stored(tmp_path / "twice"), stored(tmp_path / "reference"))
    both = sec.Plan.from_json((tmp_path / "twice" / "secateur.json").read_text())
    assert both.kept == first.then(second).kept


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1)
        self.out = nn.Conv2d(16, 8, 1, bias=False)
        self.out.weight = self.down.weight
        self.register_buffer("scale", torch.rand(16, 1, 1), persistent=False)

    def forward(self, x):
        hidden = torch.relu(self.norm(self.up(x))) * self.scale
        return self.down(hidden) + self.out(hidden)


def plain(folder):
    """A checkpoint of a model that no configuration describes, with a tied tensor stored once."""
    model = Plain().eval()
    plan = sec.plan(sec.trace(model, torch.zeros(1, 3, 8, 8)), sec.Ratio(0.5))
    folder.mkdir()
    save_file({k: v for k, v in model.state_dict().items() if k != "out.weight"}, folder / "net.safetensors")
    return model, plan


def test_a_model_of_ones_own_is_told(tmp_path):
    model, plan = plain(tmp_path / "whole")
    with pytest.raises(sec.FileError, match=r"'out.weight', which no file holds \(2 in all\); .* pass the model"):
        sec.cut_checkpoint(tmp_path / "whole", plan, tmp_path / "small")
    assert not (tmp_path / "small").exists()
    with torch.device("meta"):
        empty = Plain()
    sec.cut_checkpoint(tmp_path / "whole", plan, tmp_path / "small", model=empty)
    want = {k: v for k, v in sec.apply(model, plan).state_dict().items() if k != "out.weight"}
    same(stored(tmp_path / "small"), want)


def test_experts_that_go_and_experts_that_stay(tmp_path):
    """Against the tensor that holds all experts, cut as a whole."""
    gate_up, down = torch.randn(4, 12, 5), torch.randn(4, 5, 6)
    files = {"l.gate.weight": torch.randn(4, 5)}
    for i in range(4):
        files[f"l.experts.{i}.gate_proj.weight"] = gate_up[i, :6].clone()
        files[f"l.experts.{i}.up_proj.weight"] = gate_up[i, 6:].clone()
        files[f"l.experts.{i}.down_proj.weight"] = down[i].clone()
    (tmp_path / "whole").mkdir()
    save_file(files, tmp_path / "whole" / "model.safetensors")
    rows, stay, width = (0, 3, 5, 6, 9, 11), (1, 3), (0, 2, 4)
    kept = {
        "l.experts.gate_up_proj": {0: stay, 1: rows, 2: width},
        "l.experts.down_proj": {0: stay, 1: width, 2: rows[:3]},
        "l.gate.weight": {0: stay, 1: width},
    }
    shapes = {"l.experts.gate_up_proj": (4, 12, 5), "l.experts.down_proj": (4, 5, 6), "l.gate.weight": (4, 5)}
    small = stored(sec.cut_checkpoint(tmp_path / "whole", sec.Plan((), kept, shapes, ()), tmp_path / "small"))
    assert len(small) == 7
    for new, old in enumerate(stay):
        both = torch.cat([small[f"l.experts.{new}.{half}_proj.weight"] for half in ("gate", "up")])
        assert torch.equal(both, gate_up[old][list(rows)][:, list(width)])
        assert torch.equal(small[f"l.experts.{new}.down_proj.weight"], down[old][list(width)][:, list(rows[:3])])
    assert torch.equal(small["l.gate.weight"], files["l.gate.weight"][list(stay)][:, list(width)])
    shutil.rmtree(tmp_path / "small")
    files.pop("l.experts.2.up_proj.weight")
    save_file(files, tmp_path / "whole" / "model.safetensors")
    refused(tmp_path, "hold 7 of the 8 parts of 'l.experts.gate_up_proj'", sec.Plan((), kept, shapes, ()))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16", "float64", "int8", "int64", "bool"])
def test_every_dtype_keeps_its_bytes(tmp_path, dtype):
    tensors = {"w": (torch.randn(6, 4) * 9).to(getattr(torch, dtype)), "other": torch.zeros((), dtype=torch.int64)}
    (tmp_path / "whole").mkdir()
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    plan = sec.Plan((), {"w": {0: (0, 2, 5), 1: (1, 3)}}, {"w": (6, 4)}, ())
    small = stored(sec.cut_checkpoint(tmp_path / "whole", plan, tmp_path / "small"))
    assert torch.equal(small["w"].double(), tensors["w"].double()[[0, 2, 5]][:, [1, 3]])
    assert torch.equal(small["other"], tensors["other"])


def refused(tmp_path, words, plan=None, out="small", **more):
    with pytest.raises(sec.FileError, match=words):
        sec.cut_checkpoint(tmp_path / "whole", plan or sec.Plan((), {}, {}, ()), tmp_path / out, **more)
    assert not list(tmp_path.glob(".secateur-*"))


def test_what_does_not_fit_is_refused(tmp_path):
    model = llama().eval()
    plan = planned(model)
    model.save_pretrained(tmp_path / "whole", max_shard_size="20kB")
    shapes = {**plan.shapes, "lm_head.weight": (64, 32)}
    refused(tmp_path, r"'lm_head.weight' of shape \(64, 32\), here", sec.Plan(plan.axes, plan.kept, shapes, ()))
    refused(tmp_path, "this is the checkpoint itself|something already", plan, out="whole")
    refused(tmp_path, "no folder .*; make it first", plan, out="missing/small")
    (tmp_path / "taken").write_text("")
    refused(tmp_path, "something already", plan, out="taken")
    with pytest.raises(sec.PlanError, match="takes a Plan, not str"):
        sec.cut_checkpoint(tmp_path / "whole", "plan", tmp_path / "small")
    with pytest.raises(sec.FileError, match="no such folder"):
        sec.cut_checkpoint(tmp_path / "nothing", plan, tmp_path / "small")
    base = model.model.eval()
    base.save_pretrained(tmp_path / "base")
    with pytest.raises(sec.FileError, match="which no file holds"):
        sec.cut_checkpoint(tmp_path / "base", plan, tmp_path / "small")


def test_scales_of_quantized_weights_are_not_passed_by(tmp_path):
    model = llama().eval()
    plan = planned(model)
    model.save_pretrained(tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    tensors = load_file(file) | {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1, 1)}
    save_file(tensors, file)
    refused(tmp_path, "weight_scale_inv' is beside a tensor that is cut", plan)
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    (tmp_path / "whole" / "config.json").write_text(json.dumps({**config, "quantization_config": {"bits": 4}}))
    refused(tmp_path, "quantized", plan)


def test_hostile_folders(tmp_path):
    folder = tmp_path / "whole"
    folder.mkdir()
    refused(tmp_path, "0 files in safetensors and 0 indices")
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    save_file({"b": torch.ones(2)}, folder / "two.safetensors")
    refused(tmp_path, "2 files")
    index = folder / "model.safetensors.index.json"
    for text, words in (
        ("[]", "should hold an object"),
        ("{", "cannot be read"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": 3}}', "no weight_map"),
        ('{"weight_map": {"a": "../one.safetensors"}}', "no file of this folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "no file of this folder"),
        ('{"weight_map": {"a": "three.safetensors"}}', "not there"),
        ('{"weight_map": {"a": "two.safetensors", "b": "two.safetensors"}}', "do not agree on where 'a' is"),
        ('{"weight_map": {"a": "one.safetensors", "c": "two.safetensors"}}', "do not agree"),
        ('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}', "same key twice"),
        ('{"weight_map": ' + "[" * 200_000, "nested too deeply"),
    ):
        index.write_text(text)
        refused(tmp_path, words)
    index.unlink()
    (folder / "two.safetensors").unlink()
    whole = (folder / "one.safetensors").read_bytes()
    (folder / "one.safetensors").write_bytes(whole[:-3])
    refused(tmp_path, "damaged")
    (folder / "one.safetensors").write_bytes(whole)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": "x"}')
    refused(tmp_path, "config.json")


def in_a_process(tmp_path, before="", wait=True):
    code = (
        f"import sys, secateur as sec, torch\n{before}\n"
        "plan = sec.Plan.from_json(open(sys.argv[1] + '/plan.json').read())\n"
        "try:\n    sec.cut_checkpoint(sys.argv[1] + '/whole', plan, sys.argv[1] + '/small')\n"
        "except sec.FileError as error:\n    print(error); sys.exit(3)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    return (process.communicate(timeout=120)[0], process.returncode) if wait else process


def big(tmp_path):
    (tmp_path / "whole").mkdir()
    tensors = {f"w{i}": torch.rand(512, 256) for i in range(8)}
    for i, name in enumerate(tensors):
        save_file({name: tensors[name]}, tmp_path / "whole" / f"part{i}.safetensors")
    index = {"metadata": {}, "weight_map": {f"w{i}": f"part{i}.safetensors" for i in range(8)}}
    (tmp_path / "whole" / "model.safetensors.index.json").write_text(json.dumps(index))
    half = {0: tuple(range(0, 512, 2))}
    plan = sec.Plan((), dict.fromkeys(tensors, half), dict.fromkeys(tensors, (512, 256)), ())
    (tmp_path / "plan.json").write_text(plan.to_json())
    return tensors


def test_one_tensor_is_held_at_a_time(tmp_path, monkeypatch):
    """Beside those that are mapped: what was cut of one is written and gone before the next is."""
    big(tmp_path)
    real, made = checkpoint.select, []

    def select(*args):
        assert not [before for before in made if before() is not None]
        tensor = real(*args)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(checkpoint, "select", select)
    plan = sec.Plan.from_json((tmp_path / "plan.json").read_text())
    tied = {"w8": torch.rand(512, 256), "w9": torch.rand(512, 256)}  # several in one file
    save_file(tied, tmp_path / "whole" / "part8.safetensors")
    index = tmp_path / "whole" / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"] | dict.fromkeys(tied, "part8.safetensors")
    index.write_text(json.dumps({"weight_map": where}))
    kept, shapes = ({**had, **dict.fromkeys(tied, had["w0"])} for had in (plan.kept, plan.shapes))
    sec.cut_checkpoint(tmp_path / "whole", sec.Plan((), kept, shapes, ()), tmp_path / "small")
    assert len(made) == 10


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path):
    big(tmp_path)
    before = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    said, code = in_a_process(tmp_path, limit + "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))")
    assert code == 3
    assert "File too large" in said
    assert sorted(os.listdir(tmp_path)) == ["plan.json", "whole"]
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}


def test_too_little_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    big(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    refused(tmp_path, "GB are needed and 0.00 GB free", sec.Plan.from_json((tmp_path / "plan.json").read_text()))


def test_a_killed_process_leaves_no_folder_that_looks_whole(tmp_path):
    tensors = big(tmp_path)
    slow = (
        "import time, secateur.io.checkpoint as c\nreal = c.select\n"
        "def slow(*a):\n    time.sleep(0.3); return real(*a)\nc.select = slow"
    )
    process = in_a_process(tmp_path, slow, wait=False)
    begun = time.monotonic()
    while not list(tmp_path.glob(".secateur-*/part1.safetensors")):
        assert process.poll() is None
        assert time.monotonic() - begun < 100
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "small").exists()
    assert in_a_process(tmp_path) == ("", 0)
    same(stored(tmp_path / "small"), {name: tensor[::2] for name, tensor in tensors.items()})
