"""A file is the old one or the new one, whatever happens, and nothing else is left behind."""

import os
import stat
from pathlib import Path

import pytest
import torch
from second_process import child
from torch import nn

from secateur import FileError
from secateur.io import file as file_module
from secateur.io import load, save


def net(value: float) -> nn.Module:
    layer = nn.Linear(64, 64, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def value(path: Path) -> float:
    """The one number that a file holds; fails where it is not whole."""
    (number,) = load(path, net(-1.0)).weight.unique().tolist()
    return number


def test_killed_at_any_moment(tmp_path):
    """Processes that save again and again are killed, each at another moment."""
    out = child(
        """
        import time
        seen = set()
        save(net(0.0, 256), "file")
        start = time.perf_counter()
        save(net(0.0, 256), "file")
        took = time.perf_counter() - start
        for n in range(20):
            fork = os.fork()
            if fork == 0:
                while True:
                    n += 1
                    save(net(float(n), 256), "file")
            time.sleep(took * (0.3 + n / 2))
            os.kill(fork, signal.SIGKILL)
            os.waitpid(fork, 0)
            (number,) = load("file", net(-1.0, 256)).weight.unique().tolist()
            seen.add(number)
        print(len(seen))
        """,
        tmp_path,
    )
    assert int(out) > 3  # they did save in between


@pytest.mark.parametrize("moment", ["safetensors.torch.save_file", "os.fsync", "pathlib.Path.replace"])
def test_killed_just_before(tmp_path, moment):
    save(net(1.0), tmp_path / "file")
    child(
        f"""
        import pathlib
        {moment} = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        save(net(2.0), "file")
        """,
        tmp_path,
        status=-9,
    )
    assert value(tmp_path / "file") == 1.0
    save(net(3.0), tmp_path / "file")  # what the dead process left is in nobody's way
    assert value(tmp_path / "file") == 3.0


def test_killed_in_the_middle_of_the_bytes(tmp_path):
    save(net(1.0), tmp_path / "file")
    child(
        """
        def half(tensors, path, metadata):
            data = safetensors.torch.save(tensors, metadata)
            with open(path, "wb") as file:
                file.write(data[:len(data) // 2])
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        safetensors.torch.save_file = half
        save(net(2.0), "file")
        """,
        tmp_path,
        status=-9,
    )
    assert value(tmp_path / "file") == 1.0


def test_a_full_disk(tmp_path):
    """A limit on the size of files fails writes in the middle, as a full disk does."""
    save(net(1.0), tmp_path / "file")
    out = child(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        try:
            save(net(2.0), "file")
        except sec.FileError as error:
            print(error)
        """,
        tmp_path,
    )
    assert out.startswith("file: ")
    assert "too large" in out
    assert "damaged" not in out
    assert value(tmp_path / "file") == 1.0
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_cannot_be_written_to(tmp_path):
    save(net(1.0), tmp_path / "file")
    tmp_path.chmod(0o555)
    out = child(
        """
        if os.getuid() == 0:
            os.setuid(65534)  # root may write anywhere
        try:
            save(net(2.0), "file")
        except sec.FileError as error:
            print(error)
        """,
        tmp_path,
    )
    tmp_path.chmod(0o755)
    assert "Permission denied" in out
    assert value(tmp_path / "file") == 1.0
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("moment", [(file_module, "safe_open"), (os, "fsync"), (Path, "replace"), (Path, "chmod")])
@pytest.mark.parametrize("error", [OSError("no"), KeyboardInterrupt(), MemoryError()])
def test_a_failure_anywhere_leaves_the_old_file_alone(tmp_path, monkeypatch, moment, error):
    save(net(1.0), tmp_path / "file")

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*moment, fail)
        with pytest.raises(FileError if isinstance(error, OSError) else type(error)):
            save(net(2.0), tmp_path / "file")
    assert value(tmp_path / "file") == 1.0
    assert os.listdir(tmp_path) == ["file"]


def test_what_cannot_be_read_back_replaces_nothing(tmp_path, monkeypatch):
    save(net(1.0), tmp_path / "file")
    monkeypatch.setattr("safetensors.torch.save_file", lambda tensors, path, metadata: Path(path).write_bytes(b"x"))
    with pytest.raises(FileError, match="header too small"):
        save(net(2.0), tmp_path / "file")
    assert value(tmp_path / "file") == 1.0


def test_overwrite(tmp_path):
    save(net(1.0), tmp_path / "file", overwrite=False)
    with pytest.raises(FileError, match="there is a file already; pass overwrite=True"):
        save(net(2.0), tmp_path / "file", overwrite=False)
    assert value(tmp_path / "file") == 1.0
    save(net(2.0), tmp_path / "file")
    assert value(tmp_path / "file") == 2.0


def test_permissions(tmp_path):
    mask = os.umask(0o027)
    try:
        save(net(1.0), tmp_path / "file")
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
        (tmp_path / "file").chmod(0o600)
        save(net(2.0), tmp_path / "file")
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    finally:
        os.umask(mask)


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "link").symlink_to("deep/file")
    save(net(1.0), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert value(tmp_path / "deep" / "file") == 1.0
    assert os.listdir(tmp_path / "deep") == ["file"]


def test_paths_that_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, words in [
        (tmp_path, "no file; give the path of a file"),
        (tmp_path / "pipe", "no file; give the path of a file"),
        (tmp_path / "none" / "file", "there is no folder .*none; make it first"),
        (tmp_path / "file" / "x", "there is no folder"),
        ("nul\0", "null"),
        (None, "path is a path, not None"),
        (3, "path is a path, not 3"),
    ]:
        with pytest.raises(FileError, match=words):
            save(net(1.0), path)
    assert os.listdir(tmp_path) == ["pipe"]


def test_only_models_are_saved(tmp_path):
    with pytest.raises(FileError, match=r"a model is an nn\.Module, not dict"):
        save({"weight": torch.ones(2)}, tmp_path / "file")
    save(net(1.0), tmp_path / "file")
    with pytest.raises(FileError, match=r"a model is an nn\.Module, not str"):
        load(tmp_path / "file", "model")
