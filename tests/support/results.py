"""Functions of steps whose results are models, dataclasses and other types."""

from __future__ import annotations

import enum
import math
import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

import pydantic


class Colour(enum.Enum):
    RED = "red"


class Receipt(pydantic.BaseModel):
    number: int
    paid_at: datetime
    total: Decimal


@dataclass
class Parcel:
    weight: Decimal
    sent: date
    colours: list[Colour]


def make_receipt() -> Receipt:
    return Receipt(number=7, paid_at=datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC), total=Decimal("12.30"))


def make_parcel() -> Parcel:
    return Parcel(Decimal("1.50"), date(2030, 2, 3), [Colour.RED])


def make_instant() -> datetime:
    return datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)


def make_amount() -> Decimal:
    return Decimal("0.10")


def make_id() -> uuid.UUID:
    return uuid.UUID(int=5)


def make_pair() -> tuple[int, Receipt]:
    return 1, make_receipt()


def make_span() -> timedelta:
    return timedelta(days=2, microseconds=3)


def make_bytes() -> bytes:
    return b"\xff\x00"


def make_infinity() -> float:
    return math.inf


def make_noon() -> datetime:
    return datetime(2030, 3, 30, 12, tzinfo=ZoneInfo("Europe/Berlin"))


def make_keys() -> dict[int, Colour]:
    return {1: Colour.RED}


def make_untyped():
    return (1, {"when": make_instant(), 2: Decimal("1.0")})
