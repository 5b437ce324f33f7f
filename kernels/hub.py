"""Write the kernels as a Hugging Face hub kernel, as the package `kernels` 0.17 loads it.

    python kernels/hub.py build/hub
    python -c "from kernels import get_local_kernel; from pathlib import Path; get_local_kernel(Path('build/hub'))"
    hf upload --repo-type kernel --revision v1 NAME/swiglu-kernels build/hub

The same Python is there for CUDA and for the CPU, where it is the definition in PyTorch. A hub kernel is loaded from
any folder, beside other versions of itself. So its modules import each other by relative names, and its operators are
registered under a name that only these sources have.
"""

import argparse
import base64
import hashlib
import json
import re
import runpy
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "swiglu_kernels"
SOURCE = ROOT / "kernels" / PACKAGE
BENCHMARK = ROOT / "kernels" / "hub_benchmark.py"
LEFT_OUT = shutil.ignore_patterns("__pycache__", "py.typed")
BACKENDS = ("cuda", "cpu")
COMPAT = '''"""For versions of `kernels` that look for the package here: it is one folder above."""

import importlib.util
import json
import sys
from pathlib import Path

_above = Path(__file__).resolve().parents[1]
_name = json.loads((_above / "metadata.json").read_text(encoding="utf-8"))["id"]
if _name not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_name, _above / "__init__.py")
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])
globals().update({name: value for name, value in vars(sys.modules[_name]).items() if not name.startswith("__")})
__all__ = sys.modules[_name].__all__
'''
CARD = """---
license: apache-2.0
library_name: kernels
tags: [kernels, triton, swiglu]
---
# swiglu-kernels {version}

SwiGLU in Triton: forward and backward, for NVIDIA GPUs of compute capability 8.0 or newer. Made from swiglu-bench,
which checks and measures it. On a CPU the functions are their definitions in PyTorch.

```python
from kernels import get_kernel

swiglu = get_kernel("NAME/swiglu-kernels", version={major}, trust_remote_code=["NAME/swiglu-kernels"])
h = swiglu.swiglu_glu(x, w_gate, w_up)
swiglu.patch_model(model)
```

A kernel is code that runs in your process. `kernels` loads it from organisations that it trusts; from any other only if
`trust_remote_code` names the repository. `version` chooses the branch v{major}; without it (or `revision`) `get_kernel`
raises an error.

`kernelize` puts the layers `SwiGLUMLP` and `SwiGLUPackedMLP` (Phi-3) into the MLPs of a model, whose activation and
limit they read:

```python
from kernels import LayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from transformers.models.llama.modeling_llama import LlamaMLP

own = LayerRepository("NAME/swiglu-kernels", layer_name="SwiGLUMLP", version={major}, trust_remote_code=True)
replace_kernel_forward_from_hub(LlamaMLP, "MLP")
with use_kernel_mapping({{"MLP": {{"cuda": own}}}}):
    model = kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE)
```

`kernels benchmark NAME/swiglu-kernels@v{major}` times the functions.
"""


def relative(text: str, depth: int) -> str:
    """Source with its imports of the package as relative ones; `depth` is how many folders below the package it is."""
    dots = "." * (depth + 1)
    text = re.sub(rf"^(\s*)from {PACKAGE}\.([\w.]+) import ", rf"\1from {dots}\2 import ", text, flags=re.M)
    text = re.sub(rf"^(\s*)from {PACKAGE} import ", rf"\1from {dots} import ", text, flags=re.M)
    if left := re.search(rf"^\s*(import|from) {PACKAGE}\b.*", text, flags=re.M):
        raise ValueError(f"{left[0].strip()!r} has no relative form; write 'from {PACKAGE}... import ...'")
    return text


def write(folder: Path) -> list[Path]:
    """Write the repository into a folder, which must not exist, and return those of its packages, one a backend."""
    version = runpy.run_path(str(ROOT / "swiglu_bench" / "version.py"))["__version__"]
    major = max(1, int(version.partition(".")[0]))
    packages = [_write_variant(folder / "build" / f"torch-{backend}", backend, major) for backend in BACKENDS]
    (folder / "benchmarks").mkdir()
    shutil.copy(BENCHMARK, folder / "benchmarks" / "benchmark_swiglu.py")
    (folder / "README.md").write_text(CARD.format(version=version, major=major), encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", folder)
    return packages


def _write_variant(package: Path, backend: str, major: int) -> Path:
    shutil.copytree(SOURCE, package, ignore=LEFT_OUT)
    files = {file: file.read_text(encoding="utf-8") for file in sorted(package.rglob("*.py"))}
    unique = f"{PACKAGE}_{backend}_{hashlib.sha256(''.join(files.values()).encode()).hexdigest()[:12]}"
    for file, text in files.items():
        text = relative(text, len(file.relative_to(package).parts) - 1)
        text = text.replace(f'NAMESPACE = "{PACKAGE}"', f'NAMESPACE = "{unique}"')
        file.write_text(text.replace(f'"{PACKAGE}::', f'"{unique}::'), encoding="utf-8")
    (package / PACKAGE).mkdir()
    (package / PACKAGE / "__init__.py").write_text(COMPAT, encoding="utf-8")
    oldest = re.search(r"^MINIMUM_CAPABILITY = \((\d+), (\d+)\)", files[package / "runtime" / "backend.py"], flags=re.M)
    assert oldest, "runtime/backend.py names the oldest GPU"
    # PTX: Triton compiles for any newer.
    archs = {"archs": [f"{oldest[1]}.{oldest[2]}+PTX"]} if backend == "cuda" else {}
    digests = {
        file.relative_to(package).as_posix(): base64.b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()
        for file in sorted(package.rglob("*")) if file.is_file()
    }  # fmt: skip
    about = {
        "id": unique, "name": PACKAGE.replace("_", "-"), "version": major, "license": "Apache-2.0",
        "python-depends": [], "backend": {"type": backend, **archs},
        "digest": {"algorithm": "sha256", "files": digests},
    }  # fmt: skip
    (package / "metadata.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return package


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a new folder for the repository")
    folder = parser.parse_args().folder
    if folder.exists():
        parser.error(f"{folder} is already there; give a new folder")
    try:
        print(f"Hub kernel: {', '.join(map(str, write(folder)))}")
    except OSError as error:
        parser.error(f"{folder} cannot be written: {error}")
