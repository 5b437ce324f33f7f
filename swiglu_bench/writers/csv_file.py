"""Records into records.csv, samples.csv and checks.csv, so that neither a kill nor a full disk loses a row."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from swiglu_bench.rows.csv_table import Table, reason
from swiglu_bench.rows.record import COLUMNS, Record, TensorCheck
from swiglu_bench.rows.run_folder import CHECKS, RECORDS, SAMPLE_COLUMNS, SAMPLE_KEY, SAMPLES

CHECK_FIELDS = tuple(one.name for one in dataclasses.fields(TensorCheck))
CHECK_COLUMNS = (*SAMPLE_KEY, *CHECK_FIELDS)
"""checks.csv is long: one line per tensor that was checked, with the distribution of its error where `verify` asked."""
OWNER = itemgetter(*SAMPLE_KEY)
"""What a sample or a check has in common with the row that it belongs to."""


class CsvFile:
    """Appends each record to records.csv, samples.csv and checks.csv, on the disk when `write` returns.

    `warn` hears of the first failed write, such as on a full disk. The rows it could not write are kept in memory and
    tried again with every further record and at the end, so that a disk with room again loses nothing.
    """

    def __init__(self, folder: Path, warn: Callable[[str], object] = warnings.warn) -> None:
        """Begin the files in `folder`, or go on with those there; raises BadInput if they are not this version's."""
        self._samples = Table(folder / SAMPLES, SAMPLE_COLUMNS)
        self._checks = Table(folder / CHECKS, CHECK_COLUMNS)
        self._records = Table(folder / RECORDS, COLUMNS)
        self._tables = (self._samples, self._checks, self._records)
        self._warn = warn
        self._warned = False
        for table in self._tables:
            if table.cut_short:
                warn(f"{table.path} ended in the middle of a row, which is removed; --resume runs its case again.")

    def write(self, record: Record) -> None:
        """Append the record: samples and checks first, so that every row of records.csv has them."""
        for table, rows in zip(self._tables, (_samples(record), _checks(record), [record.row().values()]), strict=True):
            try:
                table.append(rows)
            except OSError as error:
                if not self._warned:
                    self._warn(f"{table.path} cannot be written: {reason(error)}; the run goes on and tries again.")
                self._warned = True

    def rows(self) -> list[dict[str, str]]:
        """The rows of records.csv as texts, those of earlier runs included."""
        return self._records.rows()

    def drop(self, unwanted: Callable[[dict[str, str]], bool]) -> None:
        """Remove rows, and with them all samples and checks that have no row."""
        try:
            self._records.keep(lambda row: not unwanted(row))
            owners = set(map(OWNER, self._records.rows()))
            for table in (self._samples, self._checks):
                table.keep(lambda row: OWNER(row) in owners)
        except OSError as error:
            self._warn(f"{self._records.path} still has outdated rows: {reason(error)}.")

    @property
    def lost(self) -> bool:
        """Whether rows are not on the disk."""
        return any(table.unwritten for table in self._tables)

    def close(self) -> None:
        """Try the rows that could not be written a last time, and say how many are lost."""
        for table in self._tables:
            try:
                if table.unwritten:
                    table.append([])
            except OSError as error:
                self._warn(f"{table.path} lacks its last {table.unwritten} lines: {reason(error)}.")


def _samples(record: Record) -> Iterator[list[Any]]:
    key = attrgetter(*SAMPLE_KEY)(record)
    beside = itertools.zip_longest(record.samples_ms, record.twin_ms, record.states)
    for number, (time_ms, twin_ms, state) in enumerate(beside):
        yield [*key, number, time_ms, twin_ms, *(dataclasses.astuple(state) if state else [None] * 4)]


def _checks(record: Record) -> Iterator[list[Any]]:
    key = attrgetter(*SAMPLE_KEY)(record)
    for check in record.tensor_checks:
        yield [*key, *(getattr(check, name) for name in CHECK_FIELDS)]
