"""The kernels in Triton, found in the sources of their modules: a new kernel is in no list."""

import ast
from pathlib import Path

import ptdmpi.model.kernels.fused

FOLDER = Path(ptdmpi.model.kernels.fused.__file__).parent


def kernels() -> dict[str, str]:
    """Return the source of each kernel, by "module.function". A kernel is a function that Triton
    compiles and that is launched: it asks which of its programs it is. Functions without this
    question are parts of kernels."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and "triton.jit" in decorators(node):
                source = ast.get_source_segment(text, node)
                if "tl.program_id(" in source:
                    found[f"{path.stem}.{node.name}"] = source
    return found


def decorators(node: ast.FunctionDef) -> list[str]:
    """Return the names of the decorators of a function."""
    return [ast.unparse(one).partition("(")[0] for one in node.decorator_list]
