"""Sizes as people write them: a number of bytes (22e9, "22e9"), a number with a unit ("8GB", "8G", "1.5
GiB"), a share of something whose size is known ("60%").

One invariant: text is read exactly, by fractions and not by floats, and rounded down to whole bytes; a number
that is likely to lack its unit ("8", 0.5) is refused.
"""

from __future__ import annotations

import re
from fractions import Fraction
from numbers import Real

LEAST_BARE_BYTES = 10**6
"""A smaller number, without a unit, is taken for a slip."""

UNITS = {"": 1, "b": 1} | {
    prefix + unit: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for unit, base in (("b", 1000), ("ib", 1024), ("", 1000), ("i", 1024))
}
"""Bytes by unit, in small letters: "gb" and "g" are 1000**3, "gib" and "gi" 1024**3."""

SIZE = re.compile(
    r"\s*(?P<number>\d+(?:\.\d+)?(?:e\+?\d{1,2})?)\s*(?P<unit>[a-z]*|%)\s*", re.IGNORECASE | re.ASCII
)


def is_count(value: object, least: int = 0) -> bool:
    """Return True if `value` is a whole number, `least` or more; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def parse_bytes(
    value: object, *, name: str, of_bytes: int | None = None, least: int = 0, or_none: str = ""
) -> int:
    """The bytes that `value` stands for.

    value: a whole number of bytes, or a float of at least 1 MB, rounded down; or text: such a number; or a
    number and one of B, kB, MB, GB, TB (powers of 1000; also k, M, G, T), KiB, MiB, GiB, TiB (powers of
    1024), in small or capital letters, with or without a space; or "60%".
    name: of the setting, for the messages. of_bytes: what 100% is; None where no share can be given. or_none:
    what the message adds.
    Raises ValueError for anything else, and for less than `least` bytes. Never blocks.
    """
    if isinstance(value, int) and is_count(value, least):
        return value
    text = f"{value:f}" if isinstance(value, Real) and not isinstance(value, bool) else value
    if isinstance(text, str) and (match := SIZE.fullmatch(text)):
        number, unit = Fraction(match["number"]), match["unit"].lower()
        if unit == "%":
            nbytes = _share(number, text, name, of_bytes)
        else:
            nbytes = int(number * UNITS[unit]) if unit in UNITS else -1
        if nbytes >= (least if unit else max(least, LEAST_BARE_BYTES)):
            return nbytes
    share = "" if of_bytes is None else ", or a share, as in '60%'"
    raise ValueError(
        f"{name} is {value!r}, must be a whole number of bytes, {least:,} or more, or a number with a unit, "
        f"as in '8GB' (8e9 bytes), '8GiB' (8 * 1024**3) or '500 MB'{share}{or_none}"
    )


def optional_bytes(value: object, *, name: str, of_bytes: int | None = None, least: int = 0) -> int | None:
    """`parse_bytes`, and None for None, which means "derive it"."""
    if value is None:
        return None
    return parse_bytes(value, name=name, of_bytes=of_bytes, least=least, or_none=", or None")


_SHOWN = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def bytes_text(nbytes: int) -> str:
    """With its unit, of 1000, as wherever this project says MB or GB."""
    for unit, name in _SHOWN:
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:,.2f} {name}"
    return f"{nbytes:,} B"


def enough_text(nbytes: int) -> str:
    """Size that a message says to give: no fewer bytes, as `parse_bytes` takes them."""
    for unit, name in _SHOWN:
        if nbytes >= unit:
            return f"{-(-nbytes * 100 // unit) / 100:.2f} {name}"
    return f"{nbytes} B"


def argument_bytes(value: object, *, name: str, of_bytes: int | None = None, least: int = 1) -> int | None:
    """`optional_bytes` for a size that `offload.apply` is given, without what is likely to be a slip: a
    number below 1 MB that has no unit, and more than the device has."""
    if isinstance(value, int) and is_count(value, 1) and value < LEAST_BARE_BYTES:
        raise ValueError(
            f"{name} is {value}, which is {value:,} bytes; write '{value}GB', or '{value}B' if so few are "
            "meant"
        )
    nbytes = optional_bytes(value, name=name, of_bytes=of_bytes, least=least)
    if nbytes is not None and of_bytes is not None and nbytes > of_bytes:
        raise ValueError(f"{name} is {nbytes:,} bytes and the GPU has {of_bytes:,}; give less, as in '90%'")
    return nbytes


def _share(percent: Fraction, value: str, name: str, of_bytes: int | None) -> int:
    if of_bytes is None:
        raise ValueError(
            f"{name} is {value!r}, but the size that it is a share of is not known here; write bytes, as in "
            "'8GB'. offload.apply takes shares of the device's memory, where there is a GPU"
        )
    if percent > 100:
        raise ValueError(f"{name} is {value!r}, must be a share between '0%' and '100%'")
    return int(percent * of_bytes / 100)
