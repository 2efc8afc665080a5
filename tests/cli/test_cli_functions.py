"""`MODULE:FUNCTION` of the command line: what is loaded, and what the errors say."""

import sys

import pytest

from treeshard._cli.functions import call_function, load_function
from treeshard.errors import FormatError, SpecError


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A current directory with modules, whose imports are undone."""
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(
        "size = 3\ndef make_step(x):\n    return size + x\ndef fails(x):\n    return 1 / x\n"
    )
    (tmp_path / "broken.py").write_text("\nnumber = undefined\n")
    (tmp_path / "lacking.py").write_text("import absent_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_function_is_imported_from_the_current_directory(directory) -> None:
    function = load_function("shop.train:make_step")
    assert call_function("shop.train:make_step", function, 4) == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shop.train", "'shop.train' is not MODULE:FUNCTION, as in `train:make_step` for"),
        ("./shop/train.py:make_step", "Write shop.train:make_step."),
        ("train:make_step", "there is no module 'train' in {directory}, nor is one installed."),
        ("shop.trane:make_step", "there is no module 'shop.trane' in {directory}"),
        ("shop.train:make_stp", "shop.train has no function 'make_stp'. Did you mean 'make_step'?"),
        ("shop.train:other", "has no function 'other'. It has make_step, fails."),
        ("shop.train:size", "shop.train has something that is not a function as 'size'."),
        ("broken:f", "importing broken failed at {directory}/broken.py:2: NameError: name"),
        ("lacking:f", "importing lacking failed at {directory}/lacking.py:1: ModuleNotFoundError:"),
    ],
)
def test_what_cannot_be_loaded_is_an_error_with_the_way_out(directory, text, message) -> None:
    with pytest.raises(FormatError) as error:
        load_function(text)
    assert message.format(directory=directory) in str(error.value)
    assert text in str(error.value)


def test_an_error_inside_the_function_names_its_line(directory) -> None:
    function = load_function("shop.train:fails")
    with pytest.raises(FormatError, match=r"shop\.train:fails failed at .*train\.py:5: ZeroDivis"):
        call_function("shop.train:fails", function, 0)


def test_an_error_of_treeshard_inside_the_function_stays_as_it_is() -> None:
    def refuse() -> None:
        raise SpecError("the specs do not fit")

    with pytest.raises(SpecError, match="^the specs do not fit$"):
        call_function("m:refuse", refuse)
