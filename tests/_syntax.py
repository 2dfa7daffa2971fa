"""The syntax of source files. Many tests look at the same files, and each file is parsed once."""

import ast
import functools


@functools.cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a source text, in the order of `ast.walk`."""
    return tuple(ast.walk(ast.parse(source)))
