"""A checkpoint compressed from files to files is what `compress` makes in memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import secateur as sec
from secateur.verify import beside, run

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama(folder, dtype, **more):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=48, intermediate_size=64, **more)).to(dtype)
    model.save_pretrained(folder, max_shard_size="10kB")
    (folder / "tokenizer.json").write_text("{}")
    return [{"input_ids": torch.randint(48, (2, 24))} for _ in range(4)]


def stored(folder):
    return {name: t for file in sorted(Path(folder).glob("*.safetensors")) for name, t in load_file(file).items()}


def contents(folder):
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def in_files(model, start):
    """Whether every parameter is memory that is mapped from files, and those are where they should be."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [[int(end, 16) for end in words[0].split("-")] for words in lines if words[-1].startswith(str(start))]
    return all(any(a <= p.data_ptr() < b for a, b in spans) for p in model.parameters())


@pytest.mark.parametrize(
    ("dtype", "tied", "loadable", "late"),
    [(torch.float32, False, False, True), (torch.bfloat16, True, True, False)],
    ids=["float32", "bfloat16, tied, loadable"],
)
def test_it_is_what_compress_makes(tmp_path, monkeypatch, dtype, tied, loadable, late):
    whole, small = tmp_path / "whole", tmp_path / "small"
    batches = llama(whole, dtype, tie_word_embeddings=tied)
    before = contents(whole)
    proved = []

    def prove(whole, small, plan):
        proved.append(in_files(whole, tmp_path / "whole") and in_files(small, tmp_path / ".secateur-"))
        beside.prove(whole, small, plan)

    with monkeypatch.context() as patch:
        patch.setattr(run, "_HELD", 0 if late else run._HELD)  # stand-ins for verification one at a time
        patch.setattr("secateur.io.compressing.prove", prove)
        report = sec.compress_checkpoint(whole, sec.Params(0.7), batches, small, loadable=loadable)
    assert contents(whole) == before
    assert proved == [True]

    model = LlamaForCausalLM.from_pretrained(whole, dtype="auto")
    ranked = sec.Reconstruction(batches)  # with a criterion that was given, no axis is rotated
    again = sec.compress(model, batches[0], sec.Params(0.7), batches, loadable=loadable, timed=False, importance=ranked)
    assert (report.plan, report.compensation, report.macs) == (again.plan, again.compensation, again.macs)
    model.save_pretrained(tmp_path / "reference")
    files, want = stored(small), stored(tmp_path / "reference")
    assert files.keys() == want.keys()
    for name, tensor in files.items():
        assert tensor.dtype == want[name].dtype == dtype
        torch.testing.assert_close(tensor, want[name], rtol=1e-5, atol=1e-6)
    names = {file.name for file in small.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= names
    assert ("secateur.json" in names) is not loadable
    if loadable:
        fresh = LlamaForCausalLM.from_pretrained(small, dtype="auto")
        torch.testing.assert_close(fresh(**batches[0]).logits, model(**batches[0]).logits)


class Net(nn.Module):
    """A residual network with batch norms, whose statistics are refitted too, and a buffer that no file holds."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.up, self.down = nn.Conv2d(8, 32, 1), nn.Conv2d(32, 8, 1, bias=False)
        self.after, self.head = nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.linspace(1, 2, 8).view(-1, 1, 1), persistent=False)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        x = x + self.after(self.down(torch.relu(self.up(x * self.scale))))
        return self.head(x.mean((2, 3)))


def net(folder):
    torch.manual_seed(0)
    model = Net()
    batches = [torch.randn(16, 3, 8, 8) for _ in range(4)]
    for batch in batches:
        model(batch)
    folder.mkdir()
    save_file(model.eval().state_dict(), folder / "net.safetensors")
    return model, batches


def test_a_model_of_ones_own_is_told(tmp_path):
    model, batches = net(tmp_path / "whole")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(sec.FileError, match="pass the model"):
        sec.compress_checkpoint(tmp_path / "whole", sec.Macs(0.5), batches, tmp_path / "small")
    report = sec.compress_checkpoint(tmp_path / "whole", sec.Macs(0.5), batches, tmp_path / "small", model=model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    again = sec.compress(model, batches[0], sec.Macs(0.5), batches, timed=False)
    assert report.plan == again.plan
    files = stored(tmp_path / "small")
    assert files.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(files[name], tensor, rtol=1e-5, atol=1e-6)
    assert not torch.equal(
        files["after.running_mean"], before["after.running_mean"][: len(files["after.running_mean"])]
    )

    # what was cut once is cut again, and the plan says how from the full size
    sec.compress_checkpoint(tmp_path / "small", sec.Macs(0.7), batches, tmp_path / "smaller", model=Net())
    both = sec.Plan.from_json((tmp_path / "smaller" / "secateur.json").read_text())
    fresh = sec.apply(Net().eval(), both, verify=False)
    fresh.load_state_dict(stored(tmp_path / "smaller"))


class Recurrent(nn.Module):
    """Its LSTM holds its parameters a second time, in a list."""

    def __init__(self):
        super().__init__()
        self.up, self.lstm, self.head = nn.Linear(4, 8), nn.LSTM(8, 12, batch_first=True), nn.Linear(12, 2)

    def forward(self, x):
        return self.head(self.lstm(self.up(x))[0])


def test_parameters_that_a_module_holds_twice(tmp_path):
    torch.manual_seed(0)
    model, batches = Recurrent().eval(), [torch.randn(4, 5, 4) for _ in range(3)]
    (tmp_path / "whole").mkdir()
    save_file(model.state_dict(), tmp_path / "whole" / "model.safetensors")
    with torch.device("meta"):
        empty = Recurrent()
    report = sec.compress_checkpoint(tmp_path / "whole", sec.Params(0.6), batches, tmp_path / "small", model=empty)
    ranked = sec.Reconstruction(batches)  # with a criterion that was given, no axis is rotated
    assert report.plan == sec.compress(model, batches[0], sec.Params(0.6), batches, timed=False, importance=ranked).plan
    for name, tensor in stored(tmp_path / "small").items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_whatever_fails_leaves_nothing(tmp_path, monkeypatch):
    model, batches = net(tmp_path / "whole")
    before = contents(tmp_path / "whole")

    def refused(kind, words, *, data=batches, out="small", **more):
        with pytest.raises(kind, match=words):
            sec.compress_checkpoint(tmp_path / "whole", sec.Macs(0.5), data, tmp_path / out, model=model, **more)
        assert contents(tmp_path / "whole") == before
        assert [file.name for file in tmp_path.iterdir()] == ["whole"]

    refused(sec.FileError, "this is the checkpoint itself|something already", out="whole")
    refused(sec.FileError, "make it first", out="missing/small")
    refused(
        sec.CalibrationError,
        "failed on batch",
        data=[*batches, torch.zeros(2, 5, 8, 8)],
        importance=sec.Magnitude(),
    )
    with monkeypatch.context() as patch:
        patch.setattr("secateur.io.compressing.prove", lambda *_: (_ for _ in ()).throw(sec.VerifyError("not proved")))
        refused(sec.VerifyError, "not proved")
    with monkeypatch.context() as patch:
        patch.setattr("secateur.io.compressing.ranks", lambda: 2)
        refused(sec.FileError, "for one process")
    files = load_file(tmp_path / "whole" / "net.safetensors")
    save_file({**files, "head.weight": torch.zeros(4, 9)}, tmp_path / "whole" / "net.safetensors")
    before = contents(tmp_path / "whole")
    refused(sec.FileError, r"'head.weight' is \(4, 9\), not \(4, 8\) as in Net")
    del files["head.weight"]
    save_file(files, tmp_path / "whole" / "net.safetensors")
    before = contents(tmp_path / "whole")
    refused(sec.FileError, "no file holds 'head.weight'")


def test_experts_that_files_hold_one_by_one(tmp_path):
    torch.manual_seed(0)
    sizes = {**SMALL, "vocab_size": 32, "intermediate_size": 24, "num_local_experts": 3}
    MixtralForCausalLM(MixtralConfig(**sizes)).save_pretrained(tmp_path / "whole", max_shard_size="20kB")
    batches = [torch.randint(32, (2, 16)) for _ in range(3)]
    report = sec.compress_checkpoint(tmp_path / "whole", sec.Params(0.7), batches, tmp_path / "small")
    model = MixtralForCausalLM.from_pretrained(tmp_path / "whole")
    ranked = sec.Reconstruction(batches)  # with a criterion that was given, no axis is rotated
    assert report.plan == sec.compress(model, batches[0], sec.Params(0.7), batches, timed=False, importance=ranked).plan
    assert any(".experts." in name for name in report.plan.kept)
    type(model).save_pretrained.__wrapped__(model, tmp_path / "reference")  # as files hold them, one by one
    files, want = stored(tmp_path / "small"), stored(tmp_path / "reference")
    assert files.keys() == want.keys()
    for name, tensor in files.items():
        torch.testing.assert_close(tensor, want[name], rtol=1e-5, atol=1e-6)

    (file,) = [f for f in (tmp_path / "whole").glob("*.safetensors") if any("experts.2.w3" in n for n in load_file(f))]
    tensors = load_file(file)
    (name,) = [name for name in tensors if "experts.2.w3" in name]
    tensors[name] = tensors[name][1:].clone()
    save_file(tensors, file)
    with pytest.raises(sec.FileError, match=r"6 parts of '.*\.gate_up_proj', which do not make up"):
        sec.compress_checkpoint(tmp_path / "whole", sec.Params(0.7), batches, tmp_path / "again")


MEMORY = """
import sys, threading, time, torch, secateur as sec
from pathlib import Path
from torch import nn
from safetensors.torch import save_file
from secateur.verify import beside, run

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(48, 34_000), nn.Linear(34_000, 48)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) * 1024

def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)

folder = Path(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
with torch.device("meta"):
    deep = nn.Sequential(*(Block() for _ in range(16)))
folder.joinpath("whole").mkdir()
size = 0
where = {}
for i, block in enumerate(deep):
    weights = {f"{i}.{name}": torch.randn(p.shape) / 100 for name, p in block.named_parameters()}
    save_file(weights, folder / "whole" / f"part{i}.safetensors")
    where |= dict.fromkeys(weights, f"part{i}.safetensors")
    size += sum(w.nbytes for w in weights.values())
import json
folder.joinpath("whole", "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
batches = [torch.randn(16, 48) for _ in range(2)]
run._HELD = 2**22
small = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
sec.compress(small, torch.zeros(1, 4), sec.Macs(0.5), [torch.randn(8, 4)], timed=False)  # what is imported late
peak, before = [0], anonymous()
threading.Thread(target=watch, daemon=True).start()
sec.compress_checkpoint(folder / "whole", sec.Ratio(0.5), batches, folder / "small", model=deep,
                        importance=sec.Magnitude())
print(json.dumps({"size": size, "peak": peak[0] - before}))
"""


@pytest.mark.zoo
def test_memory_is_that_of_a_few_layers(tmp_path):
    """The model's 211 MB stay in the files; beside these there are about ten copies of one of its 32 layers."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed goes back to the system
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["size"] > 200e6
    assert told["peak"] < 0.5 * told["size"], told
