"""Every module imports; one that needs an optional third party may fail only for want of it."""

import importlib
from pathlib import Path

import pytest

OPTIONAL = {
    "gguf",
    "reasoning_gym",
    "tensorboard",
    "triton",
    "vllm",
    "wandb",
}

SOURCE = Path(__file__).parent.parent / "src"
MODULES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if path.name != "__main__.py"
)


@pytest.mark.parametrize("module", MODULES)
def test_module_imports(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")
