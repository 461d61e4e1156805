"""What PyTorch's compiler says reaches nobody raw, and once in our own words."""

import io
import logging
import warnings

import pytest
import torch

from posttrain.models.quiet import compiler_explained, compiler_remarks, compiler_sentence


@pytest.fixture
def raw() -> io.StringIO:
    """What the compiler's logs would print."""
    printed = io.StringIO()
    handler = logging.StreamHandler(printed)
    logging.getLogger("torch._dynamo").addHandler(handler)
    yield printed
    logging.getLogger("torch._dynamo").removeHandler(handler)


def add(number: int, states: torch.Tensor) -> torch.Tensor:
    """It is compiled for every number."""
    return states + number


def test_a_limit_of_the_compiler_is_told_in_our_words(raw: io.StringIO) -> None:
    compiled = torch.compile(add, backend="eager", dynamic=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with compiler_explained(), torch._dynamo.config.patch(recompile_limit=2):
            for number in range(6):
                compiled(number, torch.ones(2))
    (said,) = [str(warning.message) for warning in caught]
    assert said.startswith("PyTorch's compiler gives up on 'add' (test_quiet.py:")
    assert "number == " in said
    assert said.endswith("It runs uncompiled from here on: the same numbers, slower steps")
    assert compiler_remarks == [said]
    assert raw.getvalue() == ""


def test_warnings_of_the_compiler_are_explained_and_others_left(raw: io.StringIO) -> None:
    inside = "/site-packages/torch/_inductor/compile_fx.py"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with compiler_explained():
            for _ in range(2):
                warnings.warn_explicit("odd\nthing", UserWarning, inside, 3)
            warnings.warn_explicit("a warning of yours", UserWarning, "/home/me/rewards.py", 3)
            logging.getLogger("torch._inductor.utils").warning("Not enough SMs")
            logging.getLogger("torch._dynamo").info("of no concern")
        warnings.warn_explicit("odd afterwards", UserWarning, inside, 3)
    said = [str(warning.message) for warning in caught]
    assert said == [
        compiler_sentence("odd thing"),
        "a warning of yours",
        compiler_sentence("Not enough SMs"),
        "odd afterwards",
    ]


def test_who_asks_for_the_logs_of_torch_gets_them(
    raw: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_LOGS", "recompiles")
    with compiler_explained():
        logging.getLogger("torch._dynamo").warning("as it is")
    assert raw.getvalue() == "as it is\n"


def test_an_error_of_the_compiler_is_shown_whole(raw: io.StringIO) -> None:
    with compiler_explained():
        logging.getLogger("torch._dynamo").error("failed\nthere")
    assert raw.getvalue() == "failed\nthere\n"


def test_of_a_warning_that_is_not_known_nothing_is_promised() -> None:
    said = compiler_sentence("results may be\n  incorrect\x1b[2J")
    assert said == "PyTorch's compiler remarks: results may be incorrect\\x1b[2J"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("TensorFloat32 tensor cores for float32 matrix …", 'model.compute = "bfloat16"'),
        ("T4 does not support bfloat16 compilation natively, skipping", "slower steps"),
        (
            "hit config.recompile_limit (8)\n   function: 'update' (/a/b/cache.py:48)\n"
            "   last reason: 0/7: len(room) == 2\nTo log …",
            "on 'update' (cache.py:48)",
        ),
        ("", "remarks"),
    ],
)
def test_every_sentence_says_what_follows(text: str, words: str) -> None:
    assert words in compiler_sentence(text)
