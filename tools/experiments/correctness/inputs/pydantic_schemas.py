"""Makes JSON schemas with pydantic, of random models."""

import enum
import random
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Address, IPv6Address
from typing import Annotated, Any, Literal, Optional, Union
from uuid import UUID

from pydantic import AnyUrl, BaseModel, ConfigDict, Field, Json, NaiveDatetime, SecretStr, create_model
from typing_extensions import TypedDict

NAMES = ("id", "name", "kind", "tags", "price", "created_at", "user", "items", "größe", "notes", "count", "next_page")
PATTERNS = (r"^[A-Z]{3}-\d{2,4}$", r"^\w+$", r"[a-z]+", r"^(a|b)*$")


class Color(enum.Enum):
    """A color."""

    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    """A level; the last one is larger than a double holds."""

    LOW = 1
    HIGH = 1234567890123456789


class Point(TypedDict, total=False):
    """A point."""

    x: float
    y: float


class Node(BaseModel):
    """A tree."""

    value: int
    children: list["Node"] = []


ATOMS: tuple[Any, ...] = (
    str,
    str,
    int,
    int,
    float,
    bool,
    bytes,
    None,
    Any,
    date,
    datetime,
    time,
    timedelta,
    UUID,
    Decimal,
    AnyUrl,
    IPv4Address,
    IPv6Address,
    SecretStr,
    NaiveDatetime,
    Json,
    Color,
    Level,
    Point,
    Node,
    Literal["a", "b"],
    Literal["a", 1, True],
    Literal[1234567890123456789],
    Annotated[int, Field(ge=0, le=2**63 - 1)],
    Annotated[int, Field(ge=-(2**63), le=2**63 - 1)],
    Annotated[int, Field(ge=0, le=2**64 - 1)],
    Annotated[int, Field(gt=0, lt=100)],
    Annotated[int, Field(multiple_of=5)],
    Annotated[float, Field(ge=0, le=1)],
    Annotated[float, Field(gt=0, allow_inf_nan=False)],
    Annotated[Decimal, Field(max_digits=6, decimal_places=2)],
    Annotated[Decimal, Field(ge=0)],
    Annotated[str, Field(min_length=1, max_length=12)],
)


def pydantic_schemas(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields lines with `name`, `set` and `schema`, of random models."""
    draw = random.Random(seed)
    for number in range(count):
        mode: Any = draw.choice(["validation", "serialization"])
        schema = _model(draw, 2).model_json_schema(mode=mode, by_alias=draw.random() < 0.5)
        yield {"name": f"pydantic_{number}", "set": "pydantic", "schema": schema}


def _model(draw: random.Random, depth: int, **more: Any) -> type[BaseModel]:
    fields: dict[str, Any] = {**more}
    for name in draw.sample(NAMES, draw.randint(1, 5)):
        kind = _type(draw, depth)
        match draw.randrange(6):
            case 0:
                fields[name] = (Optional[kind], None)  # noqa: UP045 kinds are values, which have no operator
            case 1:
                fields[name] = (kind, Field(description="What it is", alias=name.upper()))
            case 2:
                fields[name] = (Optional[kind], ...)  # noqa: UP045
            case _:
                fields[name] = (kind, ...)
    config = ConfigDict(extra=draw.choice(["ignore", "ignore", "forbid", "allow"]))
    model: type[BaseModel] = create_model(f"Model{draw.randrange(10**6)}", __config__=config, **fields)
    return model


def _type(draw: random.Random, depth: int) -> Any:
    if depth == 0 or draw.random() < 0.55:
        if draw.random() < 0.1:
            return Annotated[str, Field(pattern=draw.choice(PATTERNS))]
        return draw.choice(ATOMS)
    inner, other = _type(draw, depth - 1), _type(draw, depth - 1)
    match draw.randrange(10):
        case 0:
            return list[inner]  # type: ignore[valid-type]
        case 1:
            return Annotated[list[inner], Field(min_length=draw.randrange(3), max_length=4)]  # type: ignore[valid-type]
        case 2:
            return tuple[inner, other]  # type: ignore[valid-type]
        case 3:
            return tuple[inner, ...]  # type: ignore[valid-type]
        case 4:
            return dict[str, inner]  # type: ignore[valid-type]
        case 5:
            return dict[draw.choice([int, Color, Literal["x", "y"]]), inner]  # type: ignore[misc]
        case 6:
            return Union[inner, other]  # noqa: UP007 kinds are values
        case 7:
            one = _model(draw, depth - 1, type=(Literal["one"], ...))
            two = _model(draw, depth - 1, type=(Literal["two"], ...))
            return Annotated[Union[one, two], Field(discriminator="type")]  # noqa: UP007
        case 8:
            return set[draw.choice([int, str, Color, Literal["a", "b", "c"]])]  # type: ignore[misc]
        case _:
            return _model(draw, depth - 1)
