"""The installation of the null GPU, a stand-in for a GPU, which accepts all launches and computes
nothing. The null GPU consists of PyTorch's CUDA build, and of stand-ins for the CUDA libraries that
PyTorch uses.

Everything is in one folder, `build/gpu-dry`, which `make clean` removes. `site` has PyTorch's CUDA
build, `nccl4py` has the Python packages that call NCCL, `headers` has NVIDIA's header files, and
`lib` has the stand-in libraries. All other packages are those of `make setup`. The folder `null/`
has the sources of the stand-ins.
"""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.launch import ROOT

FOLDER = ROOT / "build/gpu-dry"
SITE = FOLDER / "site"
BINDINGS = FOLDER / "nccl4py"
HEADERS = FOLDER / "headers"
LIBRARIES = FOLDER / "lib"
SOURCES = Path(__file__).parent / "null"
# "===" compares whole version strings, so pip does not take a build for CPUs ("2.13.0+cpu"). Triton
# has the version for which this release of PyTorch was built.
TORCH = ("torch===2.13.0", "triton==3.7.1")
# The header files are those of the CUDA release for which PyTorch was built.
CUDA = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")
# The package by which ptdmpi calls NCCL, and the packages that it needs.
OF_BINDINGS = ("nccl4py", "cuda-core", "cuda-bindings", "cuda-pathfinder")
PINNED = ROOT / "requirements-extras.lock"
STATE = "libnullgpu.so"
RUNTIME = "libcudart.so.13"
DRIVER = "libcuda.so.1"
NCCL = "libnccl.so.2"
COMPILE = ("gcc", "-std=gnu11", "-O1", "-fPIC", "-Wall", "-Werror")
# The names of functions of NVIDIA's libraries. The generated stand-ins all have the same signature,
# because they ignore their arguments.
NVIDIA = re.compile(r"(__)?(cu|nv|nccl)\w+")
OF_RUNTIME = re.compile(r"(__)?cuda\w+")
OF_DRIVER = re.compile(r"cu[A-Z](?!ile)\w+")
OF_NCCL = re.compile(r"nccl\w+")
CUDNN = "cudnnBackendExecute"  # the function by which PyTorch launches all kernels of cuDNN
# The generated functions that launch at least one kernel on a real GPU.
LAUNCHES = re.compile(rf"cublas\w*(gemm|Gemm|gemv|Gemv|dot|Dot|trsm)\w*|cublasLtMatmul|{CUDNN}")


def environment() -> dict[str, str]:
    """Return the environment variables of a program that uses the null GPU."""
    path = [str(SITE), str(BINDINGS), str(ROOT), str(ROOT / "src"), *filter(None, sys.path)]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "LD_LIBRARY_PATH": str(LIBRARIES),
        "TRITON_LIBCUDA_PATH": str(LIBRARIES),
        # Inductor chooses kernels by measured times, and stores its choices in a cache. Times on
        # the null GPU have no meaning, so these choices get a separate cache.
        "TORCHINDUCTOR_CACHE_DIR": str(FOLDER / "compiled"),
        # The driver of the null GPU does not implement virtual memory, which expandable segments
        # need.
        "PYTORCH_ALLOC_CONF": "expandable_segments:False",
    }


def build() -> None:
    """Install PyTorch's CUDA build and nccl4py, and compile the stand-in libraries, if they are
    missing or their sources have changed."""
    _install(TORCH, SITE)
    _install(pinned(PINNED.read_text(encoding="utf-8")), BINDINGS)
    _install(CUDA, HEADERS)
    sources = [*SOURCES.glob("*.[ch]"), Path(__file__)]
    ready = LIBRARIES / "ready"
    if ready.exists() and ready.stat().st_mtime > max(file.stat().st_mtime for file in sources):
        return
    _compile()
    ready.touch()


def pinned(lock: str) -> tuple[str, ...]:
    """Return the lines "NAME==VERSION" of the packages OF_BINDINGS in the text of a lock file."""
    return tuple(line for line in lock.splitlines() if line.partition("==")[0] in OF_BINDINGS)


def _install(requirements: tuple[str, ...], folder: Path) -> None:
    listed = folder / "requirements.txt"
    wanted = "\n".join(requirements) + "\n"
    if listed.exists() and listed.read_text() == wanted:
        return
    print(f"installing {', '.join(requirements)} into {folder.relative_to(ROOT)}", flush=True)
    options = ("--quiet", "--no-deps", "--no-compile", "--upgrade", "--target", str(folder))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *requirements], check=True)
    listed.write_text(wanted)


def _compile() -> None:
    LIBRARIES.mkdir(parents=True, exist_ok=True)
    (include,) = HEADERS.glob("**/cuda_runtime_api.h")
    options = (f"-I{include.parent}", f"-I{SOURCES}")
    objects = {}
    for name in ("state", "runtime", "driver", "nccl", "libraries"):
        objects[name] = _object(SOURCES / f"{name}.c", options)
    _link(STATE, [objects["state"]])
    wanted = _wanted()
    runtime = {name for name in wanted if OF_RUNTIME.fullmatch(name)}
    driver = {name for name in wanted if OF_DRIVER.fullmatch(name)}
    nccl = {name for name in wanted if OF_NCCL.fullmatch(name)}
    others = wanted - runtime - driver - nccl
    driver |= declared((include.parent / "cuda.h").read_text(encoding="utf-8"))
    parts = {"runtime": runtime, "driver": driver, "nccl": nccl, "libraries": others}
    for part, names in parts.items():
        source = LIBRARIES / f"{part}-others.c"
        source.write_text(answers(names - _defined(objects[part])), encoding="utf-8")
        objects[f"{part} others"] = _object(source, options)
    _link(RUNTIME, [objects["runtime"], objects["runtime others"]])
    _link(DRIVER, [objects["driver"], objects["driver others"]])
    _link(NCCL, [objects["nccl"], objects["nccl others"]])
    for soname in _needed() - {RUNTIME, DRIVER, NCCL}:
        _link(soname, [objects["libraries"], objects["libraries others"]])


def answers(names: Iterable[str]) -> str:
    """Return the C source of functions with the given names that return 0, which means success in
    all of NVIDIA's libraries. A function in LAUNCHES also counts a launch."""
    lines = ['#include "null.h"']
    for name in sorted(names):
        counts = "null_add(NULL_LAUNCH); " if LAUNCHES.fullmatch(name) else ""
        if name == CUDNN:
            counts += "null_add(NULL_CUDNN); "
        lines.append(f"int {name}(void) {{ {counts}return 0; }}")
    return "\n".join(lines) + "\n"


def _object(source: Path, options: Iterable[str]) -> Path:
    made = LIBRARIES / f"{source.stem}.o"
    # Some stand-ins have the names of gcc's built-in functions, but other arguments.
    options = ("-fno-builtin", "-Wno-unused", *options)
    subprocess.run([*COMPILE, *options, "-c", str(source), "-o", str(made)], check=True)
    return made


def _link(soname: str, objects: Iterable[Path]) -> None:
    """Link `objects` to the shared library `soname`. The symbols of the library have the version
    that PyTorch's libraries require."""
    (name,) = _versions().get(soname, {soname})
    version = LIBRARIES / "version.txt"
    version.write_text(f"{name} {{ global: *; }};\n")
    state = [] if soname == STATE else ["-L", str(LIBRARIES), f"-l:{STATE}"]
    command = ["gcc", "-shared", f"-Wl,-soname,{soname}", f"-Wl,--version-script={version}"]
    command += ["-Wl,-rpath,$ORIGIN", "-o", str(LIBRARIES / soname), *map(str, objects), *state]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)


def _torch_libraries() -> list[Path]:
    return sorted((SITE / "torch/lib").glob("*.so*"))


def _printed(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _wanted() -> set[str]:
    """Return the names of NVIDIA's functions that PyTorch's libraries call."""
    text = "".join(_printed("nm", "-D", "-u", file) for file in _torch_libraries())
    names = {line.split()[-1].partition("@")[0] for line in text.splitlines() if line.strip()}
    return {name for name in names if NVIDIA.fullmatch(name)}


def _defined(file: Path) -> set[str]:
    lines = _printed("nm", "--defined-only", file).splitlines()
    return {line.split()[-1] for line in lines}


def _needed() -> set[str]:
    """Return the file names of NVIDIA's libraries that PyTorch's libraries load."""
    text = "".join(_printed("readelf", "-d", file) for file in _torch_libraries())
    return set(re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^\]]*)\]", text))


@functools.cache
def _versions() -> dict[str, set[str]]:
    """Return, for the file name of each of NVIDIA's libraries, the versions of its symbols that
    PyTorch's libraries need."""
    versions: dict[str, set[str]] = {}
    for file in _torch_libraries():
        library = ""
        for named, version in re.findall(
            r"File: (\S+)|Name: (\S+)", _printed("readelf", "-V", file)
        ):
            library = named or library
            if version:
                versions.setdefault(library, set()).add(version)
    return versions


def declared(header: str) -> set[str]:
    """Return the names of the functions that the driver's header declares. If the header replaces a
    function by a newer version, the name of the newer version is returned, too."""
    names = set(re.findall(r"CUDAAPI\s+(cu\w+)\s*\(", header))
    return names | set(re.findall(r"#\s*define\s+cu\w+\s+(cu\w+_v\d+)", header))
