"""Write the kernels as a Hugging Face hub kernel: the same Python for every GPU, build/torch-universal.

    python kernels/hub.py build/hub
    python -c "from kernels import get_local_kernel; from pathlib import Path; get_local_kernel(Path('build/hub'))"
    hf upload --repo-type kernel NAME/swiglu-kernels build/hub

A hub kernel is loaded from any folder, beside other versions of itself. So its modules import each other by relative
names, and its operators are registered under a name that only these sources have.
"""

import argparse
import hashlib
import json
import re
import runpy
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "swiglu_kernels"
SOURCE = ROOT / "kernels" / PACKAGE
LEFT_OUT = shutil.ignore_patterns("__pycache__", "py.typed")
CARD = """---
license: apache-2.0
tags: [kernels, triton, swiglu]
---
# swiglu-kernels {version}

SwiGLU in Triton: forward and backward, for NVIDIA GPUs. Made from swiglu-bench, which checks and measures it.

```python
from kernels import get_kernel

swiglu = get_kernel("NAME/swiglu-kernels")
h = swiglu.swiglu_glu(x, w_gate, w_up)
swiglu.patch_model(model)
```
"""


def relative(text: str, depth: int) -> str:
    """Source with its imports of the package as relative ones; `depth` is how many folders below the package it is."""
    dots = "." * (depth + 1)
    text = re.sub(rf"^(\s*)from {PACKAGE}\.([\w.]+) import ", rf"\1from {dots}\2 import ", text, flags=re.M)
    text = re.sub(rf"^(\s*)from {PACKAGE} import ", rf"\1from {dots} import ", text, flags=re.M)
    left = re.search(rf"^\s*(import|from) {PACKAGE}\b.*", text, flags=re.M)
    if left:
        raise ValueError(f"{left[0].strip()!r} has no relative form; write 'from {PACKAGE}... import ...'")
    return text


def write(folder: Path) -> Path:
    """Write the repository into a folder, which must not exist, and return that of its package."""
    package = folder / "build" / "torch-universal"
    shutil.copytree(SOURCE, package, ignore=LEFT_OUT)
    files = {file: file.read_text(encoding="utf-8") for file in sorted(package.rglob("*.py"))}
    digest = hashlib.sha256("".join(files.values()).encode()).hexdigest()[:12]
    unique = f"{PACKAGE}_{digest}"
    for file, text in files.items():
        text = relative(text, len(file.relative_to(package).parts) - 1)
        text = text.replace(f'NAMESPACE = "{PACKAGE}"', f'NAMESPACE = "{unique}"').replace(
            f'"{PACKAGE}::', f'"{unique}::'
        )
        file.write_text(text, encoding="utf-8")
    version = runpy.run_path(str(ROOT / "swiglu_bench" / "version.py"))["__version__"]
    about = {
        "id": unique, "name": PACKAGE.replace("_", "-"), "version": max(1, int(version.partition(".")[0])),
        "license": "Apache-2.0", "python-depends": [], "backend": {"type": "cuda"},
    }  # fmt: skip
    (package / "metadata.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(CARD.format(version=version), encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", folder)
    return package


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a new folder for the repository")
    folder = parser.parse_args().folder
    if folder.exists():
        parser.error(f"{folder} is already there; give a new folder")
    try:
        print(f"Hub kernel: {write(folder)}")
    except OSError as error:
        parser.error(f"{folder} cannot be written: {error}")
