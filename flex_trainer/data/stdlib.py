"""Real text that every CPython has: the standard library of the running interpreter, split into three domains.

- code: the library's `.py` files;
- prose: docstrings of those files, and the help topics of `pydoc`;
- data: files that are tables rather than code (character encodings, HTML entities, Unicode tables).

The domains differ in vocabulary and regularity, so a router treats them differently.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
_TABLES = ("encodings/*.py", "html/entities.py", "stringprep.py", "token.py", "keyword.py", "mimetypes.py", "stat.py")
_HELP_TOPICS = "pydoc_data/topics.py"
_SHORTEST_TEXT = 64  # characters; shorter pieces are mostly empty package files


def stdlib_root() -> Path:
    """Directory of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_documents(domain: str, seed: int, root: Path | None = None) -> Iterator[str]:
    """Texts of one domain (`code`, `prose` or `data`), in an order that depends on `seed` alone.

    Files are read one at a time, as the iterator advances.
    """
    root = root or stdlib_root()
    tables = {path for pattern in _TABLES for path in root.glob(pattern)}
    if domain == "data":
        files = sorted(tables)
    else:
        files = sorted(path for path in _python_files(root) if path not in tables)
    random.Random(f"{domain}-{seed}").shuffle(files)
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        if domain == "prose":
            text = _prose(text, path.relative_to(root).as_posix())
        if len(text) >= _SHORTEST_TEXT:
            yield text


def _python_files(directory: Path) -> Iterator[Path]:
    for path in directory.iterdir():
        if path.is_dir():
            if path.name not in _SKIPPED_DIRECTORIES:
                yield from _python_files(path)
        elif path.suffix == ".py":
            yield path


def _prose(source: str, name: str) -> str:
    """The docstrings of a file, or all its strings when it is the collection of help topics."""
    tree = ast.parse(source)
    if name == _HELP_TOPICS:
        strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        return "\n\n".join(text for text in strings if isinstance(text, str) and " " in text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return "\n\n".join(text for text in docstrings if text)
