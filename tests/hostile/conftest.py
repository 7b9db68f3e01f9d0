"""What the tests of hostile files share: a valid file, and an attempt to load that must fail and change nothing."""

import re

import pytest
from crafted import Net, Parts, fingerprint, valid

from secateur import FileError
from secateur.io import load


@pytest.fixture(scope="session")
def parts(tmp_path_factory):
    return Parts.of(valid(tmp_path_factory.mktemp("valid") / "file")[1])


@pytest.fixture
def refuses():
    """Loading a file must fail with these words, say which file, and leave the model as it was."""

    def check(path, words, model=None):
        model = Net() if model is None else model
        before = fingerprint(model)
        with pytest.raises(FileError, match=words) as caught:
            load(path, model)
        assert fingerprint(model) == before
        assert str(path) in str(caught.value)
        assert re.search(r"[.;:,] ", str(caught.value))
        assert len(str(caught.value)) < 1000

    return check
