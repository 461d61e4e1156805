"""Every module imports; one that needs an optional third party may fail only for want of it."""

import importlib
import subprocess
import sys
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


def test_a_plain_installation_is_enough() -> None:
    """The Python interface and the command line load without any of the extras."""
    extras = ["bitsandbytes", "fastapi", "gguf", "peft", "ray", "re2", "tensorboard", "triton"]
    extras += ["uvicorn", "wandb", "datasets", "openai"]
    script = f"""
import sys
sys.modules.update(dict.fromkeys({extras}))  # None: the import of one fails
from posttrain import api, research
from posttrain.cli import app
"""
    subprocess.run([sys.executable, "-c", script], check=True)
