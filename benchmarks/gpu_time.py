"""Where a GPU's time goes: the kernels of some work, by what they do.

    python benchmarks/gpu_time.py --json gpu_time.json

Sampling: 512 completions of 256 tokens to 64 prompts, SmolLM2-135M shape, layers compiled; that of
learning is shown by learning.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from bench_models import build_model, prompts
from samplers import Job, Native, Setup, set_threads
from torch.profiler import ProfilerActivity, profile

KINDS = {  # words in the names of kernels; the first that is found counts
    "attention": ("flash", "fmha", "attend", "attention", "sdpa"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
    "fused by the compiler": ("triton",),
    "copies and casts": ("copy", "memcpy", "memset", "fill"),
}


def kernels_of(work: Callable[[], object]) -> dict[str, Any]:
    """Milliseconds of each kind of kernel, and the longest of them by name."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    kernels = [(one.key, one.self_device_time_total / 1e3) for one in seen.key_averages()]
    kinds: dict[str, float] = dict.fromkeys([*KINDS, "everything else"], 0.0)
    for name, spent in kernels:
        kinds[kind_of(name)] += spent
    return {"kernel_ms": kinds, "longest_kernels": sorted(kernels, key=lambda one: -one[1])[:15]}


def kind_of(name: str) -> str:
    """What a kernel does, by its name.

    >>> kind_of("nvjet_tst_128x152_64x6"), kind_of("void flash_bwd_kernel"), kind_of("reduce")
    ('matrix products', 'attention', 'everything else')
    """
    lower = name.lower()
    fitting = (kind for kind, words in KINDS.items() if any(word in lower for word in words))
    return next(fitting, "everything else")


def tell(found: dict[str, Any]) -> str:
    """The kinds in a line, and the longest kernels below it."""
    kinds = ", ".join(f"{kind} {ms:.0f}" for kind, ms in found["kernel_ms"].items())
    names = "\n".join(f"  {ms:7.1f}  {name[:100]}" for name, ms in found["longest_kernels"][:8])
    return f"Kernels, ms: {kinds}. The longest:\n{names}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_time.py needs a GPU")
    set_threads("cuda")
    model, tokenizer = build_model("smollm2-135m")
    setup = Setup(model=model, tokenizer=tokenizer, device="cuda", compute=torch.bfloat16)
    asked = [tuple(tokenizer(text).input_ids) for text in prompts(64, ragged=False)]
    job = Job(prompts=asked, group=8, new_tokens=256)
    engine = Native(setup, compiled=True)
    seconds = [engine.sample(job, seed=1)[0] for _ in range(3)]  # compiled, captured, as it is
    found = kernels_of(lambda: engine.sample(job, seed=1))
    print(f"{seconds[-1]:.3f} s, of which kernels {sum(found['kernel_ms'].values()):.0f} ms")
    print(tell(found))
    if given.json:
        given.json.write_text(json.dumps({"seconds": seconds, **found}, indent=1))


if __name__ == "__main__":
    main()
