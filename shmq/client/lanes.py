"""Which topics a consumer of many takes from, and in which order: the names, patterns and policy
that `Broker.consumer` was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast, get_args

from shmq.names import check_name, check_pattern, is_pattern, matches

Policy = Literal["fair", "strict", "weighted"]

POLICIES: Final = get_args(Policy)
#: The weights of three levels. Those of another number of levels are halves of each other.
_THREE: Final = (8, 4, 1)
_WEIGHT_MOST: Final = 1_000_000
_HALVINGS: Final = 19  # of the highest weight, at most: 2 ** 19 is below _WEIGHT_MOST


@dataclass(frozen=True)
class Plan:
    """The levels, each a topic or a pattern, and how they share."""

    entries: tuple[str, ...]
    policy: Policy
    weights: tuple[int, ...] | None
    """As given; None: the policy's own."""

    @property
    def level_weights(self) -> tuple[int, ...]:
        """The weight of each level. With `fair` all topics are on one level."""
        count = len(self.entries)
        if self.policy == "fair":
            return (1,)
        if self.policy == "strict":
            return (1,) * count
        if self.weights is not None:
            return self.weights
        if count == len(_THREE):
            return _THREE
        return tuple(2 ** min(_HALVINGS, count - 1 - level) for level in range(count))

    @property
    def follows(self) -> bool:
        """Whether there is a pattern."""
        return any(map(is_pattern, self.entries))

    def level(self, number: int) -> int:
        """The level of an entry."""
        return 0 if self.policy == "fair" else number

    def level_of(self, topic: str) -> int | None:
        """The level of a topic that a pattern matches: that of the first one. None if the topic is
        named itself, or matches none."""
        if topic in self.entries:
            return None
        for number, entry in enumerate(self.entries):
            if is_pattern(entry) and matches(entry, topic):
                return self.level(number)
        return None


def plan(topics: object, policy: str | None, weights: object) -> Plan:
    """Check what `Broker.consumer` was given. Raises BadName for a topic or a pattern, TypeError
    and ValueError for everything else."""
    if isinstance(topics, bytes | bytearray) or not isinstance(topics, Sequence):
        raise TypeError(
            f"topic must be a name, a pattern or a list of them, not {type(topics).__name__}"
        )
    entries = (topics,) if isinstance(topics, str) else tuple(topics)
    if not entries:
        raise ValueError("topic is an empty list: name at least one topic or pattern")
    for entry in entries:
        if isinstance(entry, str) and is_pattern(entry):
            check_pattern(entry)
        else:
            check_name(entry, "topic")
    twice = sorted({entry for entry in entries if entries.count(entry) > 1})
    if twice:
        raise ValueError(f"topic names {', '.join(map(repr, twice))} twice: name each once")
    if policy is None:
        policy = "fair" if weights is None else "weighted"
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
    return Plan(entries, cast(Policy, policy), _checked(weights, policy, len(entries)))


def _checked(weights: object, policy: str, count: int) -> tuple[int, ...] | None:
    if weights is None:
        return None
    if policy != "weighted":
        raise ValueError(f"weights go with policy='weighted', not with {policy!r}")
    if isinstance(weights, str | bytes) or not isinstance(weights, Sequence):
        raise TypeError(f"weights must be a list of whole numbers, not {weights!r}")
    for weight in weights:
        if not isinstance(weight, int) or isinstance(weight, bool):
            raise TypeError(f"weights must be whole numbers, not {weight!r}")
        if not 1 <= weight <= _WEIGHT_MOST:
            raise ValueError(f"weights must be from 1 to {_WEIGHT_MOST}, not {weight}")
    if len(weights) != count:
        raise ValueError(f"weights has {len(weights)} numbers for {count} topics or patterns")
    return tuple(weights)
