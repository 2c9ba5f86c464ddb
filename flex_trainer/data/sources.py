"""Documents (plain strings) from wherever the `data` section points, one iterator per domain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flex_trainer.config import nearest
from flex_trainer.data.config import FILE_SUFFIXES, STDLIB, DataConfig
from flex_trainer.data.stdlib import stdlib_documents
from flex_trainer.errors import UserError

_PLAIN_TEXT = (".txt", ".md")


def open_documents(config: DataConfig) -> dict[str, Iterator[str]]:
    """Iterators of documents by domain: the standard library has several domains, other sources one, `text`.

    Raises:
        ValueError: a file that is missing or of an unknown kind, a dataset that cannot be loaded, a missing column.
    """
    if config.name == STDLIB:
        return {domain: stdlib_documents(domain, config.seed) for domain in config.domains}
    if config.files:
        paths = [_checked_file(name) for name in config.files]
        return {"text": _file_documents(paths, config.text_column)}
    return {"text": _column(_load_named(config), config.text_column, config.name or "")}


def _checked_file(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"data file {name!r} does not exist; paths are relative to the current directory")
    if path.suffix not in FILE_SUFFIXES:
        raise UserError(f"data file {name!r} is of an unknown kind; known endings: {', '.join(FILE_SUFFIXES)}")
    return path


def _file_documents(paths: list[Path], text_column: str) -> Iterator[str]:
    for path in paths:
        if path.suffix in _PLAIN_TEXT:
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"data file {str(path)!r} is not text in UTF-8: {error.reason}") from error
            yield text
            continue
        import datasets

        builder = "parquet" if path.suffix == ".parquet" else "json"
        try:
            table = datasets.load_dataset(builder, data_files=str(path), split="train")
        except Exception as error:  # the library raises many kinds here: bad JSON, bad Parquet, no schema, empty file
            if path.stat().st_size == 0:
                continue
            raise UserError(f"data file {str(path)!r} cannot be read as {builder}: {_first_line(error)}") from error
        yield from _column(table, text_column, str(path))


def _load_named(config: DataConfig) -> Any:
    import datasets

    try:
        return datasets.load_dataset(config.name or "", config.config, split=config.split)
    except Exception as error:  # not found, no network, wrong split, wrong configuration: all are for the user to mend
        raise UserError(
            f"dataset {config.name!r} (config {config.config!r}, split {config.split!r}) cannot be loaded: "
            f"{_first_line(error)}"
        ) from error


def _column(table: Any, column: str, source: str) -> Iterator[str]:
    if column not in table.column_names:
        raise UserError(f"{source!r} has no column {column!r} (text_column); {nearest(column, table.column_names)}")
    for row in table:
        text = row[column]
        if not isinstance(text, str):
            raise UserError(f"column {column!r} of {source!r} holds {type(text).__name__}, but text is needed")
        yield text


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
