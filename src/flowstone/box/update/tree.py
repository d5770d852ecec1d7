"""The tree of changes to a tuple while update operations are applied.

Theory of operation: values that no operation touches keep their bytes. Operations on one document are combined as the
server does it. The first operation is stored with its path (`Bar`). For the second and later operations, the container
at which the paths diverge is decomposed (`Array`, `Map`), and a `Route` leads to it. These steps determine the order of
a map's keys in the result and which repeated operations are errors, so this module follows the server step by step.
"""

from __future__ import annotations

from typing import Final, Protocol

from flowstone.box.engine.field_types import (
    KIND_ARRAY,
    KIND_INT,
    KIND_MAP,
    KIND_STR,
    KIND_UINT,
    children_of,
    elements_of,
    end_of,
    kind_at,
)
from flowstone.box.engine.paths import INDEX_BASE, Step
from flowstone.box.update.operation import (
    Operation,
    UpdateStep,
    WrongStep,
    changed_twice,
    failed,
    no_such_field,
    wrong_path,
)
from flowstone.box.update.scalar import Float, Result, compute
from flowstone.iproto.msgpack import pack, unpack

Steps = tuple[UpdateStep, ...]


class Typed(Protocol):
    """A format's definition of a value: its type and its nested values."""

    @property
    def type(self) -> str: ...

    def child_at(self, step: Step) -> Typed | None: ...


class Untyped:
    """Placeholder for an unknown format: a double stays a double."""

    type: Final = "?"

    def child_at(self, step: Step) -> Typed | None:
        return self


class TreeNode:
    """A value of the tuple. This base class is an unchanged value; `raw` is the original MessagePack."""

    __slots__ = ("raw",)

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def opened(self, operation: Operation, steps: Steps) -> TreeNode:
        """Return the node that replaces this one before the operation is applied, and stays if the operation fails."""
        return self

    def apply(self, operation: Operation, steps: Steps) -> TreeNode:
        """Apply the operation at the end of `steps`; return the node that replaces this one."""
        return Bar(self.raw, operation, steps)

    def packed(self, typed: Typed | None) -> bytes:
        return self.raw


class Scalar(TreeNode):
    """A value that was replaced as a whole."""

    __slots__ = ("result",)

    def __init__(self, raw: bytes, result: Result) -> None:
        super().__init__(raw)
        self.result = result

    def apply(self, operation: Operation, steps: Steps) -> TreeNode:
        raise changed_twice(operation)

    def packed(self, typed: Typed | None) -> bytes:
        return _packed(self.result, typed)


class Bar(TreeNode):
    """A value with a single operation somewhere inside."""

    __slots__ = ("code", "key", "operation", "parent_at", "path", "point_at", "point_end", "result")

    def __init__(self, raw: bytes, operation: Operation, path: Steps) -> None:
        super().__init__(raw)
        self.operation = operation
        self.path = path
        self.code = operation.code
        self.key: str | None = None
        self.parent_at = self.point_at = 0
        self._locate()
        self.point_end = end_of(raw, self.point_at) if self.point_at < len(raw) else len(raw)
        self.result: Result = b""
        self._prepare()

    def _locate(self) -> None:
        """Find the target. For `=` and `!` it may be new: the end of an array, or a key that a map does not have."""
        last = len(self.path) - 1
        for number, step in enumerate(self.path):
            if isinstance(step, WrongStep):
                raise wrong_path(self.operation, step)
            self.parent_at = self.point_at
            found = _child_at(self.raw, self.point_at, step)
            if found is not None:
                self.point_at = found
                continue
            if self.code not in "=!":
                raise no_such_field(self.operation)
            following = self.path[number + 1] if number < last else None
            if isinstance(following, WrongStep) and not following.is_every:
                raise wrong_path(self.operation, following)
            if following is not None:
                raise no_such_field(self.operation)
            self._locate_new(step)

    def _locate_new(self, step: Step) -> None:
        kind = kind_at(self.raw, self.parent_at)
        if isinstance(step, str):
            if kind != KIND_MAP:
                raise failed(self.operation, "can not access by key a non-map field")
            self.key = step
            self.point_at = children_of(self.raw, self.parent_at)[1]
        else:
            if kind != KIND_ARRAY:
                raise failed(self.operation, "can not access by index a non-array field")
            count, _ = children_of(self.raw, self.parent_at)
            if step != count:
                raise no_such_field(self.operation)
            self.point_at = end_of(self.raw, self.parent_at)
        self.code = "!"

    def _prepare(self) -> None:
        is_map = kind_at(self.raw, self.parent_at) == KIND_MAP
        if self.code == "!":
            if is_map and self.key is None:
                raise failed(self.operation, "the key exists already")
            self.point_end = self.point_at
        elif self.code == "#":
            if is_map and self.operation.arguments[0] != 1:
                raise failed(self.operation, "can delete only 1 field from a map in a row")
        elif self.code == "=":
            self.result = self.operation.value
        else:
            self.result = compute(self.operation, self.raw[self.point_at : self.point_end])

    def opened(self, operation: Operation, steps: Steps) -> TreeNode:
        return _branch(self, operation, steps)

    def moved_into(self, start: int, end: int, path: Steps) -> Bar:
        """Return the same change, relative to the nested value from `start` to `end` that contains it."""
        moved = Bar.__new__(Bar)
        moved.raw, moved.path = self.raw[start:end], path
        moved.operation, moved.code, moved.key, moved.result = self.operation, self.code, self.key, self.result
        moved.parent_at, moved.point_at = self.parent_at - start, self.point_at - start
        moved.point_end = self.point_end - start
        return moved

    def packed(self, typed: Typed | None) -> bytes:
        if self.code == "!":
            return self._with_insertion()
        if self.code == "#":
            return self._with_deletion()
        for step in self.path:
            assert not isinstance(step, WrongStep)
            typed = typed.child_at(step) if typed is not None else None
        return self.raw[: self.point_at] + _packed(self.result, typed) + self.raw[self.point_end :]

    def _with_insertion(self) -> bytes:
        count, first = children_of(self.raw, self.parent_at)
        before, value, after = self.raw[first : self.point_at], self.operation.value, self.raw[self.point_at :]
        if self.key is None:
            return self.raw[: self.parent_at] + array_head(count + 1) + before + value + after
        return self.raw[: self.parent_at] + _map_head(count // 2 + 1) + pack(self.key) + value + after

    def _with_deletion(self) -> bytes:
        count, first = children_of(self.raw, self.parent_at)
        if kind_at(self.raw, self.parent_at) == KIND_MAP:
            head, at, end = _map_head(count // 2 - 1), self._key_at(first), self.point_end
        else:
            at = end = self.point_at
            position = self.path[-1]
            assert isinstance(position, int)
            deleted = min(self.operation.arguments[0], count - position)
            for _ in range(deleted):
                end = end_of(self.raw, end)
            head = array_head(count - deleted)
        return self.raw[: self.parent_at] + head + self.raw[first:at] + self.raw[end:]

    def _key_at(self, at: int) -> int:
        """Return the offset of the key of the value at `point_at`."""
        while True:
            value_at = end_of(self.raw, at)
            if value_at == self.point_at:
                return at
            at = end_of(self.raw, value_at)


class Route(TreeNode):
    """A value with several operations, all inside the container at the end of `path`."""

    __slots__ = ("hop_at", "hop_end", "next_hop", "path")

    def __init__(self, raw: bytes, path: Steps, next_hop: TreeNode, hop_at: int, hop_end: int) -> None:
        super().__init__(raw)
        self.path = path
        self.next_hop = next_hop
        self.hop_at = hop_at
        self.hop_end = hop_end

    def opened(self, operation: Operation, steps: Steps) -> TreeNode:
        return self if steps[: len(self.path)] == self.path else _branch(self, operation, steps)

    def apply(self, operation: Operation, steps: Steps) -> TreeNode:
        if len(steps) == len(self.path):
            raise no_such_field(operation)
        self.next_hop = self.next_hop.apply(operation, steps[len(self.path) :])
        return self

    def moved_into(self, start: int, end: int, path: Steps) -> TreeNode:
        if not path:
            return self.next_hop
        return Route(self.raw[start:end], path, self.next_hop, self.hop_at - start, self.hop_end - start)

    def packed(self, typed: Typed | None) -> bytes:
        for step in self.path:
            assert not isinstance(step, WrongStep)
            typed = typed.child_at(step) if typed is not None else None
        return self.raw[: self.hop_at] + self.next_hop.packed(typed) + self.raw[self.hop_end :]


class Array(TreeNode):
    """A decomposed array; the tuple itself is one."""

    __slots__ = ("items",)

    def __init__(self, raw: bytes) -> None:
        super().__init__(raw)
        # Bytes represent an unchanged node, as most fields of a tuple are.
        self.items: list[bytes | TreeNode] = list(elements_of(raw))

    def apply(self, operation: Operation, steps: Steps) -> TreeNode:
        step, rest = _first(operation, steps)
        if not isinstance(step, int):
            raise failed(operation, "can't update an array by a non-numeric index")
        code, size = operation.code, len(self.items)
        if not rest and (code == "!" or (code == "=" and step == size)):
            self.items.insert(_position(operation, step, size + 1), operation.value)
            return self
        at = _position(operation, step, size)
        if not rest and code == "#":
            del self.items[at : at + operation.arguments[0]]
            return self
        item = self.items[at]
        node = TreeNode(item) if isinstance(item, bytes) else item
        if rest:
            self.items[at] = opened = node.opened(operation, rest)
            self.items[at] = opened.apply(operation, rest)
        else:
            self.items[at] = _changed(node, _with_field(operation, step, at))
        return self

    def packed(self, typed: Typed | None) -> bytes:
        parts = [
            item if isinstance(item, bytes) else item.packed(typed.child_at(number) if typed is not None else None)
            for number, item in enumerate(self.items)
        ]
        return array_head(len(parts)) + b"".join(parts)


class _Item:
    """A key of a map that an operation refers to, and the pairs after it; if `key` is None, only the pairs."""

    __slots__ = ("key", "node", "tail")

    def __init__(self, key: str | None, node: TreeNode, tail: list[tuple[bytes, bytes]]) -> None:
        self.key = key
        self.node = node
        self.tail = tail


class Map(TreeNode):
    """A decomposed map. Keys that operations refer to are written first, most recent first, as servers do."""

    __slots__ = ("items", "size")

    def __init__(self, raw: bytes) -> None:
        super().__init__(raw)
        count, at = children_of(raw, 0)
        self.size = count // 2
        pairs = []
        for _ in range(self.size):
            value_at = end_of(raw, at)
            end = end_of(raw, value_at)
            pairs.append((raw[at:value_at], raw[value_at:end]))
            at = end
        self.items = [_Item(None, TreeNode(b""), pairs)]

    def put(self, key: str, node: TreeNode) -> None:
        """Make `node` the value of `key`, which must exist."""
        item = self._split_at(key)
        assert item is not None
        item.node = node

    def apply(self, operation: Operation, steps: Steps) -> TreeNode:
        key, rest = _first(operation, steps)
        if not isinstance(key, str):
            raise failed(operation, "can't update a map by not a string key")
        item = self._find(key) or self._split_at(key)
        if rest:
            if item is None:
                raise no_such_field(operation)
            item.node = item.node.opened(operation, rest)
            item.node = item.node.apply(operation, rest)
        elif operation.code == "#":
            if operation.arguments[0] != 1:
                raise failed(operation, "can delete only 1 field from a map in a row")
            self._delete(item)
        elif item is not None:
            if operation.code == "!":
                raise failed(operation, "the key exists already")
            item.node = _changed(item.node, operation)
        elif operation.code in "=!":
            self.size += 1
            self.items.insert(0, _Item(key, TreeNode(operation.value), []))
        else:
            raise no_such_field(operation)
        return self

    def _delete(self, item: _Item | None) -> None:
        if item is not None:
            item.key, item.node = None, TreeNode(b"")
            self.size -= 1

    def _find(self, key: str) -> _Item | None:
        return next((item for item in self.items if item.key == key), None)

    def _split_at(self, key: str) -> _Item | None:
        """Split off and return the item of a key that no operation has referred to yet; None if the key is missing."""
        for item in self.items:
            for number, (name, value) in enumerate(item.tail):
                if kind_at(name, 0) != KIND_STR or unpack(name) != key:
                    continue
                after = item.tail[number + 1 :]
                if number == 0 and item.key is None:
                    item.key, item.node, item.tail = key, TreeNode(value), after
                    return item
                item.tail = item.tail[:number]
                self.items.insert(0, _Item(key, TreeNode(value), after))
                return self.items[0]
        return None

    def packed(self, typed: Typed | None) -> bytes:
        parts = [_map_head(self.size)]
        for item in self.items:
            if item.key is not None:
                parts += pack(item.key), item.node.packed(typed.child_at(item.key) if typed is not None else None)
        for item in self.items:
            parts += [name + value for name, value in item.tail]
        return b"".join(parts)


def _branch(node: Bar | Route, operation: Operation, steps: Steps) -> TreeNode:
    """Return `node` with the container decomposed at which the new operation's path diverges from the old one."""
    raw, at, common = node.raw, 0, 0
    while True:
        step = steps[common] if common < len(steps) else None
        old = node.path[common] if common < len(node.path) else None
        if isinstance(step, WrongStep) and not step.is_every:
            raise wrong_path(operation, step)
        if step != old:
            break
        if step is None:
            raise changed_twice(operation)
        assert not isinstance(step, WrongStep)
        found = _child_at(raw, at, step)
        if found is None:
            # The path leads into a value that another operation has added. Servers do not define this case.
            raise changed_twice(operation)
        at = found
        common += 1
    end = end_of(raw, at)
    container = _container(operation, raw[at:end], step)
    if old is None or (isinstance(container, Map) and not isinstance(old, str)):
        # A path into a value that another operation has written, or beside a numeric key, is not defined either.
        raise changed_twice(operation)
    _put_child(container, node, at, node.path[common:])
    return Route(raw, steps[:common], container, at, end) if common else container


def _container(operation: Operation, raw: bytes, step: UpdateStep | None) -> Array | Map:
    kind = kind_at(raw, 0)
    if kind == KIND_ARRAY:
        if not isinstance(step, int):
            raise failed(operation, "can not update array by non-integer index")
        return Array(raw)
    if kind == KIND_MAP:
        if not isinstance(step, str):
            raise failed(operation, "can not update map by non-string key")
        return Map(raw)
    raise no_such_field(operation)


def _put_child(container: Array | Map, node: Bar | Route, at: int, path: Steps) -> None:
    """Move the changes of `node` so far into `container`, which is at offset `at` of the node's bytes."""
    step, rest = path[0], path[1:]
    if isinstance(node, Bar) and not rest and node.code in "!#":
        # Inserting and deleting change the container itself, so the operation is applied again.
        container.apply(node.operation, path)
        return
    assert not isinstance(step, WrongStep)
    start = _child_at(container.raw, 0, step)
    assert start is not None
    child = node.moved_into(at + start, at + end_of(container.raw, start), rest)
    if isinstance(container, Array):
        assert isinstance(step, int)
        container.items[step] = child
    else:
        assert isinstance(step, str)
        container.put(step, child)


def _child_at(raw: bytes, at: int, step: Step) -> int | None:
    """Return the offset of the value that `step` selects in the container at `at`, or None."""
    kind = kind_at(raw, at)
    if kind == KIND_ARRAY and isinstance(step, int):
        count, at = children_of(raw, at)
        if step >= count:
            return None
        for _ in range(step):
            at = end_of(raw, at)
        return at
    if kind == KIND_MAP:
        # A number also selects an integer key of a map, with the value that is written in the path (from 1).
        key, key_kind = (step + INDEX_BASE, KIND_UINT | KIND_INT) if isinstance(step, int) else (step, KIND_STR)
        count, at = children_of(raw, at)
        for _ in range(count // 2):
            value_at = end_of(raw, at)
            if kind_at(raw, at) & key_kind and unpack(raw[at:value_at]) == key:
                return value_at
            at = end_of(raw, value_at)
    return None


def _first(operation: Operation, steps: Steps) -> tuple[UpdateStep, Steps]:
    step = steps[0]
    if isinstance(step, WrongStep) and not step.is_every:
        raise wrong_path(operation, step)
    return step, steps[1:]


def _position(operation: Operation, step: int, count: int) -> int:
    """Return `step` as a position from the start of `count` items; raise an error if it is out of range."""
    at = step if step >= 0 else step + count
    if not 0 <= at < count:
        raise no_such_field(operation)
    return at


def _with_field(operation: Operation, step: int, at: int) -> Operation:
    """Return the operation with a non-negative field number, as later error messages of the server have it."""
    if step >= 0 or operation.text:
        return operation
    return Operation(operation.code, at, operation.arguments, operation.path, operation.text, operation.value)


def _changed(node: TreeNode, operation: Operation) -> TreeNode:
    """Return `node` after an operation on the whole value. `=` overrides earlier operations."""
    if operation.code == "=":
        return Scalar(node.raw, operation.value)
    if type(node) is not TreeNode:
        raise changed_twice(operation)
    return Scalar(node.raw, compute(operation, node.raw))


def _packed(result: Result, typed: Typed | None) -> bytes:
    if not isinstance(result, Float):
        return result
    if isinstance(typed, Untyped):
        return result.packed(is_double=result.was_double)
    return result.packed(is_double=typed is not None and typed.type == "double")


def array_head(count: int) -> bytes:
    if count < 0x10:
        return bytes((0x90 | count,))
    return b"\xdc" + count.to_bytes(2, "big") if count < 0x10000 else b"\xdd" + count.to_bytes(4, "big")


def _map_head(count: int) -> bytes:
    if count < 0x10:
        return bytes((0x80 | count,))
    return b"\xde" + count.to_bytes(2, "big") if count < 0x10000 else b"\xdf" + count.to_bytes(4, "big")
