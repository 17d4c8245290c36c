"""Builds the fake GPU: cuda.c, nccl.c, and a function that returns 0 for every other symbol that PyTorch asks for."""

import re
import subprocess
from pathlib import Path

import torch

HERE = Path(__file__).parent
SITE = Path(torch.__path__[0]).parent
ASKING = ("torch_cuda", "c10_cuda", "torch_python", "caffe2_nvrtc", "torch_nvshmem")  # libraries of PyTorch
REAL = ("cuFile", "cufft", "cusolver", "cusparse")  # NVIDIA's own, which run without a card until they are used


def build(folder: Path) -> None:
    """Write libcuda.so.1 into a folder. It serves as libcuda, libcudart, libcublas and libnccl when it is preloaded."""
    includes = ["-I", SITE / "nvidia/cu13/include", "-I", SITE / "triton/backends/nvidia/include"]
    gcc = ["gcc", "-w", "-fPIC", "-O1", *includes]
    objects = []
    for source in HERE.glob("*.c"):
        objects.append(folder / f"{source.stem}.o")
        subprocess.run([*gcc, "-c", source, "-o", objects[-1]], check=True)
    rest = folder / "rest.c"
    rest.write_text("".join(f"int {name}() {{ return 0; }}\n" for name in sorted(wanted() - symbols("T", *objects))))
    library = folder / "libcuda.so.1"
    new = folder / "new.so"  # another check may be using the library
    link = ["-shared", "-Wl,-soname,libcuda.so.1", *objects, rest, "-o", new, "-lpthread", "-ldl"]
    subprocess.run([*gcc, *link], check=True)
    new.replace(library)
    linked = folder / "libcuda.so"  # for Triton's launchers, which link with -lcuda
    linked.unlink(missing_ok=True)
    linked.symlink_to(library.name)


def wanted() -> set[str]:
    """The functions of CUDA, cuBLAS and NCCL that PyTorch is linked with, and those that Triton looks up."""
    libraries = [SITE / f"torch/lib/lib{name}.so" for name in ASKING]
    found = symbols("U", *filter(Path.exists, libraries))
    found |= set(re.findall(r"\bcu[A-Z][a-z]\w+", (SITE / "triton/backends/nvidia/driver.c").read_text()))
    names = {name for name in found if re.match("cu[A-Z]|cuda|cublas|nccl", name)}
    return {name for name in names if not name.startswith(REAL)}


def symbols(kind: str, *files: Path) -> set[str]:
    """The names that `nm` lists as T (defined in the files) or U (asked for)."""
    dynamic = ["-D"] if kind == "U" else []
    listed = subprocess.run(["nm", *dynamic, *files], capture_output=True, text=True, check=True).stdout
    return set(re.findall(rf" {kind} (\w+)", listed))
