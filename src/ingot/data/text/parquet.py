"""Documents of a .parquet file, through pyarrow: a few rows at a time, of one column."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ingot.data.text.records import field_text, no_field
from ingot.errors import ConfigError, DataError

BATCH_ROWS = 256


def read_parquet(path: Path, text_field: str, advance: Callable[[int], None]) -> Iterator[str]:
    """A row per document; `advance` is told each row group's share of the file."""
    try:
        import pyarrow  # type: ignore[import-not-found, import-untyped]
        from pyarrow.parquet import ParquetFile  # type: ignore[import-not-found, import-untyped]
    except ImportError:
        raise ConfigError(f"reading {path} needs the package pyarrow; install it with: pip install ingot[parquet]") from None
    size, row = path.stat().st_size, 0
    try:
        with ParquetFile(path) as file:
            names, groups = file.schema_arrow.names, file.num_row_groups
            if names.count(text_field) != 1:
                raise no_field(str(path), text_field, names, "column")
            for group in range(groups):
                for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=[text_field]):
                    for value in batch.column(0).to_pylist():
                        row += 1
                        yield field_text({text_field: value}, f"{path}, row {row}", text_field)
                advance(size * (group + 1) // groups - size * group // groups)
            if not groups:
                advance(size)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path} is not a parquet file, or it is damaged after row {row:,}: {reason}; copy it again") from None
