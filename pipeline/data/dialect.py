"""Finds how a CSV file is written by its first records, without pandas, and asks for what these do not tell."""

import codecs
import csv
import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice, zip_longest
from pathlib import Path
from typing import BinaryIO, cast

from pipeline.data.errors import DataError, refuse
from pipeline.errors import first_of

Record = list[str]

# What stands in place of a number that is not there, as pandas has it.
MISSING = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
    "NULL", "NaN", "None", "n/a", "nan", "null",
)  # fmt: skip
# Separators and decimal signs by names that a shell leaves as they are; only the first four separators are looked for.
SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|", "space": r"\s+"}
DECIMALS = {"point": ".", "comma": ","}
# Records that are looked at.
_FIRST = 200
_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}

_INFINITE = re.compile(r"[+-]?inf(?:inity)?", re.IGNORECASE)
# A whole number with leading zeros, as codes have.
CODE = re.compile(r"0\d+")
# A comma or a point between groups of three digits, or before the fraction: which of both it is is not said.
_EITHER = re.compile(r"[+-]?[1-9]\d{0,2}[,.]\d{3}")


@dataclass(frozen=True)
class Dialect:
    """The way a file is written: `skipped` lines are empty, the numbers of the columns `codes` have leading zeros.

    `decimal` is None where no number says. A column without a name is called "Unnamed: 0" by its place, as pandas has
    it; without a line of names each is called by its place alone.
    """

    encoding: str
    separator: str
    decimal: str | None
    named: bool
    names: tuple[str, ...]
    skipped: int
    codes: tuple[str, ...] = ()


@cache
def number_in(decimal: str) -> re.Pattern[str]:
    """Returns the pattern of a number with such a decimal sign, whose thousands may be grouped by the other one."""
    sign, group = re.escape(decimal), re.escape("." if decimal == "," else ",")
    whole = rf"(?:[1-9]\d{{0,2}}(?:{group}\d{{3}})+|\d+)"
    return re.compile(rf"[+-]?(?:{whole}(?:{sign}\d*)?|{sign}\d+)(?:[eE][+-]?\d+)?")


def find(
    path: str, header: bool | None = None, separator: str | None = None, decimal: str | None = None,
    encoding: str | None = None,
) -> Dialect:  # fmt: skip
    """Returns how a file is written; what is given is taken as it is. Raises `DataError` for what has to be given."""
    _check(header, separator, decimal, encoding)
    if not encoding:
        with opened(path) as file:
            head = file.read(4)
        # UTF-16 has a mark, or a zero beside each letter.
        encoding = next((name for mark, name in _MARKS.items() if head.startswith(mark)), "utf-8")
        if b"\0\0" in (head[1::2], head[::2]):
            encoding = "utf-16-le" if head[1::2] == b"\0\0" else "utf-16-be"
    chosen = SEPARATORS.get(separator or "", separator) or _separator(path, encoding)
    decimal = DECIMALS.get(decimal or "", decimal)
    records = _first(path, encoding, chosen)
    skipped = next((place for place, record in enumerate(records) if record), 0)
    records = [record for record in records if any(field.strip() for field in record)]
    if not records:
        raise DataError(f"rows in {path}", "none", "another data.path")
    named = _is_named(path, records) if header is None else header
    decimal = decimal or _decimal(path, records[1:] if named else records)
    names = [name.strip() or f"Unnamed: {place}" if named else str(place) for place, name in enumerate(records[0])]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        received = f"{first_of(twice, between=', ', last=' and')} more than once"
        instead = "another name for one of them, or data.build.header=false, if that is a row"
        raise DataError(f"columns of different names in {path}", received, instead)
    zeros = {place for record in records for place, field in enumerate(record) if CODE.fullmatch(field.strip())}
    codes = tuple(name for place, name in enumerate(names) if place in zeros)
    return Dialect(encoding, chosen, decimal, named, tuple(names), skipped, codes)


def numbers(texts: Collection[str], decimal: str) -> list[float] | None:
    """Returns texts as numbers with such a decimal sign; None where one of them is none."""
    pattern, group = number_in(decimal), "." if decimal == "," else ","
    if all(pattern.fullmatch(text) or _INFINITE.fullmatch(text) for text in texts):
        return [float(text.replace(group, "").replace(decimal, ".")) for text in texts]
    return None


def is_ambiguous(text: str) -> bool:
    """True if a comma in a number may be its decimal sign, or group thousands, as in "1,234"."""
    return "," in text and _EITHER.fullmatch(text) is not None


def lines(path: str, dialect: Dialect) -> list[int]:
    """Returns the line that each record below the names begins in, from 1: quotes may hold several lines."""
    return [line for line, _ in _records(path, dialect.encoding, dialect.separator)][dialect.skipped + dialect.named :]


def too_long(path: str, dialect: Dialect) -> str | None:
    """Returns what is wrong with the first record that is no row of the table, and its line; None where none is."""
    width = len(dialect.names)
    try:
        for line, record in _records(path, dialect.encoding, dialect.separator, strict=True):
            if len(record) > width:
                return f"{len(record)} fields in line {line}, {width} in the first"
    except csv.Error as error:
        return f"a quote that nothing ends in line {error.args[1]}"
    return None


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """A file, open for reading bytes."""
    try:
        with gzip.open(path) if path.lower().endswith(".gz") else Path(path).open("rb") as file:
            yield cast("BinaryIO", file)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} to be a table that can be read", error, "another data.path") from error


def _records(path: str, encoding: str, separator: str, strict: bool = False) -> Iterator[tuple[int, Record]]:
    """Yields a file's records, each with the line that it begins in. With `strict`, quotes have to end: `csv.Error`."""
    is_space, line = separator == SEPARATORS["space"], 1
    try:
        with opened(path) as file, io.TextIOWrapper(file, encoding, newline="") as text:
            source = ("\t".join(each.split()) if is_space else each for each in text)
            reader = csv.reader(source, delimiter="\t" if is_space else separator, skipinitialspace=True, strict=strict)
            for record in reader:
                yield line, record
                line = reader.line_num + 1
    except UnicodeError as error:
        expected = f"{path} to be text in {encoding.removesuffix('-sig')}"
        offer = "latin-1" if encoding.startswith("utf-8") else "utf-8"
        instead = f"data.build.encoding={offer}, or cp1252, or saving it anew in UTF-8"
        raise DataError(expected, "bytes that are none", instead) from error
    except csv.Error as error:
        if strict:
            raise csv.Error(error, line) from error
        raise DataError(f"{path} to be a table", error, "another data.path") from error


def _first(path: str, encoding: str, separator: str) -> list[Record]:
    return [record for _, record in islice(_records(path, encoding, separator), _FIRST)]


def _check(header: bool | None, separator: str | None, decimal: str | None, encoding: str | None) -> None:
    is_one = separator is None or separator in SEPARATORS or (len(separator) == 1 and separator not in '"\r\n')
    refuse(
        (header not in (None, True, False), "data.build.header to be true or false", header, "data.build.header=false"),
        (not is_one, f"data.build.separator to be {', '.join(SEPARATORS)} or one character", f"{separator!r}",
         "data.build.separator=semicolon"),
        (decimal not in (None, *DECIMALS, *DECIMALS.values()), "data.build.decimal to be point or comma",
         f"{decimal!r}", "data.build.decimal=comma"),
    )  # fmt: skip
    try:
        codecs.lookup(encoding or "utf-8")
    except LookupError as error:
        instead = "data.build.encoding=latin-1"
        raise DataError("data.build.encoding to be one that Python knows", encoding, instead) from error


def _separator(path: str, encoding: str) -> str:
    """The separator by which most records have as many fields as the first."""
    scores = {}
    for name in ("comma", "semicolon", "tab", "bar"):
        records = [record for record in _first(path, encoding, SEPARATORS[name]) if record]
        width = len(records[0]) if records else 0
        if width > 1:
            alike = sum(len(record) == width for record in records) / len(records)
            numbers = sum(_is_number(field) for record in records for field in record) / (width * len(records))
            scores[name] = alike, numbers
    if not scores:
        rows = [record for record in _first(path, encoding, SEPARATORS["space"]) if record]
        if rows and all(len(record) == len(rows[0]) > 1 for record in rows):
            received = "lines without any, but with spaces"
            raise DataError(f"columns separated by commas in {path}", received, "data.build.separator=space")
        return ","
    best = [name for name, score in scores.items() if score == max(scores.values())]
    if len(best) > 1:
        received = f"lines that can be divided at each {' or '.join(best)}"
        raise DataError(f"columns with one separator in {path}", received, f"data.build.separator={best[0]}")
    return SEPARATORS[best[0]]


def _is_number(field: str) -> bool:
    return any(pattern.fullmatch(field.strip()) for pattern in (_INFINITE, number_in("."), number_in(",")))


def _is_named(path: str, records: Sequence[Record]) -> bool:
    """True if the first record is the names of columns: words above numbers, and no value of a column."""
    first, words, again = records[0], 0, 0
    digits = [name for name in first if _is_number(name)]
    for name, *fields in zip_longest(*records, fillvalue=""):
        column = [field for field in fields if field.strip() not in MISSING]
        if column and name.strip() and not _is_number(name):
            are_numbers = sum(map(_is_number, column)) * 2 > len(column)
            words += are_numbers
            again += not are_numbers and name in column
    if (not digits and not again) or len(records) < 2:
        return True
    # Whole numbers, each of them once, may be names, as pandas writes of columns that have none.
    if not words and (again or len(set(digits)) < len(digits) or not all(name.isdecimal() for name in digits)):
        return False
    received = f"{first_of(first, between=', ', last=' and')}, which may be names or a row"
    raise DataError(f"a first line of names in {path}", received,
                    "data.build.header=false, if it is a row, or data.build.header=true")  # fmt: skip


def _decimal(path: str, records: Sequence[Record]) -> str | None:
    signs: dict[str, str] = {}
    for fields in zip_longest(*records, fillvalue=""):
        column = [text for field in fields if (text := field.strip()) not in MISSING]
        if sum(map(_is_number, column)) * 2 > len(column):
            for field in column:
                if sign := _sign_of(field):
                    signs.setdefault(sign, field)
    if len(signs) > 1:
        instead = "data.build.decimal=point, or comma, which says what it is"
        raise DataError(f"numbers with one decimal sign in {path}", " and ".join(signs.values()), instead)
    return next(iter(signs), None)


def _sign_of(field: str) -> str | None:
    """The decimal sign that a number says it has.

    >>> [_sign_of(field) for field in ("1.5", "0,123", "1,234", "1,234,567", "1.234,5", "7", "Oslo")]
    ['.', ',', None, '.', ',', None, None]
    """
    says = [sign for sign in ".," if number_in(sign).fullmatch(field)]
    return says[0] if len(says) == 1 and not _EITHER.fullmatch(field) else None
