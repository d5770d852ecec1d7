"""Names in the JSON text of log rows: of row types, of keys of headers and bodies, of Raft states.

The tables for kernels have slots of equal size for the texts, and a second array with their lengths.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from flowstone.iproto.constants import Key, RaftKey, RequestType

TYPES = {kind.value: kind.name.removeprefix("RAFT_") for kind in RequestType}
KEYS = {key.value: key.name.lower() for key in Key} | {Key.OPS.value: "operations"}
RAFT_KEYS = {key.value: key.name.lower() for key in RaftKey}
RAFT_STATES = {1: "follower", 2: "candidate", 3: "leader"}

SLOT = 32
KEYS_MAX = 128
"""Kernels support body keys below this number. The slots of the keys of Raft rows follow those of other keys."""


def _slots(texts: Mapping[int, str], count: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the texts in slots of SLOT bytes, and their lengths; 0 for a number without a text."""
    table, lengths = np.zeros((count, SLOT), np.uint8), np.zeros(count, np.uint8)
    for slot, text in texts.items():
        table[slot, : len(text)] = np.frombuffer(text.encode(), np.uint8)
        lengths[slot] = len(text)
    return table.reshape(-1), lengths


TYPE_TEXTS, TYPE_LENGTHS = _slots({n: f'"type":"{name}"' for n, name in TYPES.items()}, max(TYPES) + 1)
KEY_TEXTS, KEY_LENGTHS = _slots(
    {n: f'"{name}":' for n, name in KEYS.items()} | {KEYS_MAX + n: f'"{name}":' for n, name in RAFT_KEYS.items()},
    2 * KEYS_MAX,
)
