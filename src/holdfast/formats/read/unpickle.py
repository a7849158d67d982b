"""Reading pickles as data: an interpreter that builds values and cannot run code.

Foreign checkpoints are pickled.  Python's unpickler imports and calls any global that a pickle names, and
even a restricted one can be made to allocate without bounds.  This one has only the opcodes that data
needs, keeps its memo in a dict, and replaces every global by its entry in a table, or refuses it:

    tree = unpickle(data, {("collections", "OrderedDict"): dict})

A table maps (module, name) to a function, which is called where the pickle calls the global, or to a
plain value (a dtype's name, say).  Classes whose instances only carry fields are `UnknownInstance`s.

A few bytes can cost much: a list that is referred to a million times, a number that is formatted again
and again, keys with one hash.  So the cost of operations is counted while the pickle is read, and the
size of its value at the end, shared parts each time they occur; both are bounded by the length of the
pickle.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from holdfast.base.errors import FormatError, HoldfastError

_C = TypeVar("_C")
_Table = Mapping[tuple[str, str], Any]

_MAX_STACK = 1 << 24
_MAX_NODES = 1 << 21
"""Most parts of a value; shared parts count each time they occur."""
FREE_NODES, NODES_PER_BYTE = 1 << 17, 8
"""Parts allowed for any value, and per byte of its pickle."""
_CONTAINER_NODES = 8
"""Parts that a container or an instance counts as."""
FREE_TEXT, TEXT_PER_BYTE = 1 << 20, 16
"""Bytes of text allowed for any value, and per byte of its pickle."""
_DIGITS = 4300
"""Most digits of a number: Python formats no more."""
_MAX_ALIKE = 1 << 8
"""Most keys of a dict, or members of a set, with one hash: they are compared pairwise."""
_MAX_NAME = 1 << 10
"""Most characters of a global's name."""
_MAX_KEY = 1 << 10
"""Most parts of a tuple as a key."""
COST_PER_BYTE, PART_COST = 64, 16
"""Cost allowed per byte of a pickle, and cost of a part: 4 parts, or 64 characters, per byte."""

MALFORMED = (
    TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError, struct.error,
)  # fmt: skip
"""Errors that Python raises for unexpected values, RecursionError included."""


@contextmanager
def understood(what: str, place: str) -> Iterator[None]:
    """Raise Python's errors for unexpected values, in this block, as FormatError."""
    try:
        yield
    except HoldfastError:
        raise
    except MALFORMED as error:
        message = f"not a {what} checkpoint that can be understood: {type(error).__name__}: {error}"
        raise FormatError(message[:500], key=place) from error


class UnknownInstance:
    """An instance of a class that is not imported: class name, arguments and fields."""

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        self.name = name
        self.args = args
        self.fields: dict[str, Any] = {}

    def __getitem__(self, field: str) -> Any:
        if field not in self.fields:
            raise FormatError(f"malformed pickle: a {self.name} without {field!r}")
        return self.fields[field]

    def get(self, field: str, default: Any = None) -> Any:
        return self.fields.get(field, default)


class OpaqueInstance(UnknownInstance):
    """An instance of a class that is in no table, with all values that it was made from."""

    is_stored = False
    """True once a pickle has stored it; the result of a call that is never stored belongs to no object."""

    def keep(self, *values: Any) -> None:
        """Add values that a pickle passes to it."""
        self.fields.setdefault("held", []).extend(values)


class _Stranger:
    """A global that is in no table."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any) -> OpaqueInstance:
        return OpaqueInstance(self.name, args)


def record(name: str) -> Callable[..., UnknownInstance]:
    """Return a table entry for a class whose instances become `UnknownInstance`s."""
    return lambda *args: UnknownInstance(name, args)


_CONTAINERS = (tuple, list, dict, set, frozenset)
_PRIME = (1 << 61) - 1
"""Modulus of Python's hashes of numbers."""
_TOO_LARGE = 10**_DIGITS


class _Mark:
    pass


_MARK = _Mark()


class _Refuse(Exception):
    pass


def unpickle(
    data: bytes | memoryview,
    table: _Table,
    persistent: Callable[[Any], Any] | None = None,
    *,
    lenient: bool = False,
    most: int | None = None,
) -> Any:
    """Return the value of a pickle of protocol 2 to 5, of at most `most` parts (default `_MAX_NODES`).

    Runs no code of the pickle.  FormatError if it is malformed, or has an opcode that data does not need
    or a global that is not in the table.  `lenient`: an object of such a global becomes an
    `OpaqueInstance`, unless it makes a tensor; the caller must look for these.
    """
    machine = _Machine(memoryview(data), table, persistent, lenient=lenient)
    try:
        value = machine.run()
        parts, text = FREE_NODES + NODES_PER_BYTE * len(data), FREE_TEXT + TEXT_PER_BYTE * len(data)
        check_size(value, min(most or _MAX_NODES, parts), text)
        return value
    except _Refuse as error:
        raise FormatError(f"pickle refused at byte {machine.at}: {error}") from None
    except FormatError:
        raise
    except MALFORMED as error:
        what = f"{type(error).__name__}: {error}"
        raise FormatError(f"malformed pickle at byte {machine.at}: {what}") from None


class Global:
    """A global of the table, on the stack."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value


@dataclass(eq=False)
class _Machine:
    data: memoryview
    table: _Table
    persistent: Callable[[Any], Any] | None
    lenient: bool
    has_strangers: bool = False
    clean: dict[int, UnknownInstance] = field(default_factory=dict)
    """Instances in which nothing unknown was found, by id."""
    at: int = 0
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    spent: int = 0
    num_made: int = 0
    """Number of containers and instances made."""
    alike: Counter[tuple[int, int]] = field(default_factory=Counter)

    def run(self) -> Any:
        while True:
            code = self.take(1)[0]
            if code == 0x2E:  # STOP
                result = self.stack.pop()
                if self.stack:
                    raise _Refuse("something is left on the stack")
                return _value(result)
            step = _STEPS.get(code)
            if step is None:
                raise _Refuse(f"opcode {bytes([code])!r} has no place in data")
            step(self)
            if len(self.stack) > _MAX_STACK:
                raise _Refuse("the stack grows without end")

    # -- bytes ------------------------------------------------------------------------------------

    def take(self, count: int) -> memoryview:
        if count < 0 or self.at + count > len(self.data):
            raise _Refuse("the pickle is cut short")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        return int(struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0])

    def line(self) -> str:
        stop = bytes(self.data[self.at : self.at + 512]).find(b"\n")
        if stop < 0:
            raise _Refuse("a name without end")
        text = bytes(self.take(stop)).decode()
        self.take(1)
        return text

    # -- stack ------------------------------------------------------------------------------------

    def since_mark(self) -> list[Any]:
        for i in range(len(self.stack) - 1, -1, -1):
            if self.stack[i] is _MARK:
                items = self.stack[i + 1 :]
                del self.stack[i:]
                return [_value(x) for x in items]
        raise _Refuse("no mark")

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise _Refuse("a mark where a value should be")
        return value

    def find(self, module: str, name: str) -> None:
        if len(module) + len(name) > _MAX_NAME:
            raise _Refuse("a name without end")
        full_name = f"{module}.{name}"
        if (module, name) in self.table:
            self.stack.append(Global(full_name, self.table[module, name]))
        elif self.lenient and not (name.startswith("_rebuild") or name.endswith("Storage")):
            self.has_strangers = True
            self.stack.append(Global(full_name, _Stranger(full_name)))
        else:
            raise _Refuse(f"it names {full_name}, which is not known to be data")

    def call(self, args: Any) -> None:
        function = self.pop()
        if isinstance(function, OpaqueInstance):
            self.push(OpaqueInstance(function.name, (function, args)))
            return
        if not isinstance(function, Global) or not (callable(function.value) or self.lenient):
            raise _Refuse(f"it calls {getattr(function, 'name', type(function).__name__)}")
        if not isinstance(args, tuple):
            raise _Refuse("a call whose arguments are no tuple")
        make, unknown = function.value, self.pay(args)
        if not callable(make):
            unknown = function.name
        # a known function's result of an unknown argument is unknown, too
        self.push(make(*args) if unknown is None else OpaqueInstance(unknown, args))

    def pay(self, value: Any) -> str | None:
        """Count the parts that a function may copy, hash or format, shared ones each time.  Return the
        name of an unknown object among them."""
        unknown: str | None = None
        seen: dict[int, UnknownInstance] = {}
        most, todo = COST_PER_BYTE * len(self.data) + (1 << 16), [value]
        for node in todo:
            if isinstance(node, (str, bytes, bytearray, int)):
                self.spent += _length(node)
            elif isinstance(node, _CONTAINERS):
                self.spent += PART_COST * len(node)
                if self.spent <= most:
                    todo += _parts(node)
            elif isinstance(node, OpaqueInstance):
                unknown = unknown or node.name
                self.spent += len(node.name)
            elif isinstance(node, UnknownInstance):
                self.spent += len(node.name)
                if self.has_strangers and id(node) not in self.clean:
                    seen[id(node)] = node
                    self.spent += PART_COST * (len(node.args) + len(node.fields))
                    if self.spent <= most:
                        todo += (*node.args, *node.fields.values())
        self.spend(0)
        if unknown is None:
            self.clean |= seen
        return unknown

    def build(self) -> None:
        state, target = _value(self.pop()), self.stack[-1]
        if isinstance(target, OpaqueInstance):
            target.keep(state)
        elif isinstance(target, UnknownInstance):
            self.changes(state)
            parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
            for part in parts:
                if isinstance(part, dict):
                    if not all(isinstance(k, str) or _is_small(k) for k in part):
                        raise _Refuse("a field whose name is no text")
                    self.spend(PART_COST * len(part))
                    target.fields.update({str(k): v for k, v in part.items()})
                elif isinstance(part, OpaqueInstance):
                    target.fields["unknown"] = part
                elif part is not None:
                    self.pay(part)
                    target.fields["state"] = part
        elif not isinstance(target, (dict, list)):  # attributes of containers are dropped
            raise _Refuse(f"it sets the state of a {type(target).__name__}")

    def push(self, made: Any) -> None:
        """Push a new container or instance; counted, as one byte of a pickle takes hundreds of memory."""
        self.num_made += 1
        if self.num_made > max(_MAX_NODES >> 1, len(self.data) >> 3):
            raise _Refuse(f"it makes more than {_MAX_NODES >> 1} lists, dicts, sets and objects")
        self.stack.append(made)

    def spend(self, cost: int) -> None:
        """Count a cost; refuse if it exceeds the bound for the pickle's length."""
        self.spent += cost
        if self.spent > COST_PER_BYTE * len(self.data) + (1 << 16):
            raise _Refuse("it asks for more than it holds")

    def changes(self, *values: Any) -> None:
        """Record that an object changes, so that objects known to be clean may hold unknown ones."""
        if self.clean and any(isinstance(v, (UnknownInstance, *_CONTAINERS)) for v in values):
            self.clean.clear()

    def drop(self, *values: Any) -> None:
        """Check values that a pickle discards: the result of a function that sets an object's state, or
        parts of a tuple that holds itself, which are stored."""
        for value in values:
            if not isinstance(value, OpaqueInstance) or value.is_stored:
                continue
            target = value.args[0] if value.args else None
            if not isinstance(target, OpaqueInstance):
                raise _Refuse(f"it names {value.name}, which is not known to be data")
            target.keep(value)


def _value(x: Any) -> Any:
    """Return the table's value of a global; other values unchanged."""
    if x is _MARK:
        raise _Refuse("a mark where a value should be")
    if isinstance(x, Global):
        if isinstance(x.value, _Stranger):
            return OpaqueInstance(x.name)
        if callable(x.value):
            return UnknownInstance(x.name)
        return x.value
    return x


def _length(value: str | bytes | bytearray | int) -> int:
    """Return the length of a text, or of a number as text."""
    return value.bit_length() >> 2 if isinstance(value, int) else len(value)


def check_size(value: Any, most: int, most_text: int | None = None) -> None:
    """FormatError for a value of more than `most` parts, or of more than `most_text` bytes of texts and
    numbers; shared parts count each time they occur."""
    count, length, todo = 1, 0, [value]
    seen: set[int] = set()
    while todo:
        node = todo.pop()
        if isinstance(node, (str, bytes, bytearray, int)):
            length += _length(node)
            continue
        parts = contents_of(node, seen)
        count += len(parts)  # counted first: a list may hold itself a thousand times
        if isinstance(node, (UnknownInstance, *_CONTAINERS)):
            count += _CONTAINER_NODES - 1
        if count > most or (most_text is not None and length > most_text):
            what = f"{most} parts" if count > most else f"{most_text} bytes"
            raise FormatError(f"malformed pickle: a value of more than {what}")
        todo += parts
    if most_text is not None and length > most_text:
        raise FormatError(f"malformed pickle: a value of more than {most_text} bytes")


def contents_of(value: Any, seen: set[int]) -> Collection[Any]:
    """Return the contents of a container or an instance; empty for other values, and for an
    `OpaqueInstance` in `seen`, as such objects often hold each other."""
    if isinstance(value, OpaqueInstance):
        if id(value) in seen:
            return ()
        seen.add(id(value))
    is_instance = isinstance(value, UnknownInstance)
    return (*value.args, *value.fields.values()) if is_instance else _parts(value)


def _parts(value: Any) -> Collection[Any]:
    """Return the items of a plain container, a dict's keys and values; empty for other values."""
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    return value if isinstance(value, _CONTAINERS) else ()


def _push(make: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(make(m))


def _sized(form: str, wrap: Callable[[bytes], Any]) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(wrap(bytes(m.take(m.number(form)))))


def _tuple(count: int) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        items = [_value(m.pop()) for _ in range(count)]
        m.push(tuple(reversed(items)))

    return step


def _target(m: _Machine, items: list[Any], kind: type[_C], what: str) -> _C | None:
    """Return the container that items are put into; None for an unknown object, which keeps them."""
    target = m.stack[-1]
    if isinstance(target, OpaqueInstance):
        target.keep(*items)
        return None
    if not isinstance(target, kind):
        raise _Refuse(f"it {what} a {type(target).__name__}")
    m.changes(*items)
    return target


def _set_items(m: _Machine, items: list[Any]) -> None:
    if (target := _target(m, items, dict, "sets items of")) is not None:
        target.update(zip(_keys(items[::2], m.alike, target), items[1::2], strict=True))


def _append(m: _Machine, items: list[Any]) -> None:
    if (target := _target(m, items, list, "appends to")) is not None:
        target.extend(items)


def _add_items(m: _Machine) -> None:
    items = m.since_mark()
    if (target := _target(m, items, set, "adds to")) is not None:
        target.update(_keys(items, m.alike, target))


def _keys(
    items: list[Any], alike: Counter[tuple[int, int]] | None = None, owner: Any = None
) -> list[Any]:
    """Return `items` if they are safe to hash as keys of `owner`.  Refuses nested tuples, which can take
    exponential time, and many keys of one hash, which take quadratic time.  `alike`: counts by hash so far.
    """
    alike = Counter() if alike is None else alike
    for item in items:
        if isinstance(item, (str, bytes, UnknownInstance)) or item is None or _is_small(item):
            continue  # no file can make many of these with one hash
        parts = item if isinstance(item, tuple) else ()
        if len(parts) > _MAX_KEY:
            raise _Refuse(f"a key of more than {_MAX_KEY} parts")
        if isinstance(item, frozenset) or any(isinstance(p, (tuple, frozenset)) for p in parts):
            raise _Refuse("a key of nested tuples")
        same = id(owner), hash(item)
        alike[same] += 1
        if alike[same] > _MAX_ALIKE:
            raise _Refuse(f"more than {_MAX_ALIKE} keys of one hash")
    return items


def _is_small(value: Any) -> bool:
    """True for a number that has a hash of its own."""
    return isinstance(value, int) and -_PRIME < value < _PRIME


def new_set(items: Any = ()) -> set[Any]:
    """The built-in `set`."""
    return set(_keys(list(items)))


def new_dict(pairs: Any = ()) -> dict[Any, Any]:
    """The built-in `dict`, of another one or of pairs."""
    pairs = list(pairs.items() if isinstance(pairs, dict) else pairs)
    return dict(zip(_keys([key for key, _ in pairs]), (value for _, value in pairs)))


def _set_item(m: _Machine) -> None:
    value, key = _value(m.pop()), _value(m.pop())
    _set_items(m, [key, value])


def _put(index: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        m.memo[index(m)] = m.stack[-1]
        if isinstance(m.stack[-1], OpaqueInstance):
            m.stack[-1].is_stored = True

    return step


def _long(m: _Machine, form: str) -> int:
    size = m.number(form)
    number = int.from_bytes(m.take(size), "little", signed=True) if size <= _DIGITS else _TOO_LARGE
    if abs(number) >= _TOO_LARGE:
        raise _Refuse(f"a number of more than {_DIGITS} digits")
    return number


def _stack_global(m: _Machine) -> None:
    name, module = m.pop(), m.pop()
    if not isinstance(module, str) or not isinstance(name, str):
        raise _Refuse("a global whose name is no text")
    m.find(module, name)


def _new_with_names(m: _Machine) -> None:
    """NEWOBJ_EX, with arguments by name, which only unknown objects may have."""
    named, args = _value(m.pop()), m.pop()
    function = m.stack[-1]
    if not (isinstance(function, Global) and isinstance(function.value, _Stranger)):
        raise _Refuse("opcode b'\\x92' has no place in data")
    m.call((*args, named) if isinstance(args, tuple) else args)


def _persistent(m: _Machine) -> None:
    if m.persistent is None:
        raise _Refuse("it refers to an object outside of it")
    reference = _value(m.pop())
    m.pay(reference)
    m.stack.append(m.persistent(reference))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


_STEPS: dict[int, Callable[[_Machine], object]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME
    ord("("): _push(lambda m: _MARK),
    ord("N"): _push(lambda m: None),
    0x88: _push(lambda m: True),
    0x89: _push(lambda m: False),
    ord("J"): _push(lambda m: m.number("i")),
    ord("K"): _push(lambda m: m.number("B")),
    ord("M"): _push(lambda m: m.number("H")),
    0x8A: _push(lambda m: _long(m, "B")),
    0x8B: _push(lambda m: _long(m, "i")),
    ord("G"): _push(lambda m: struct.unpack(">d", m.take(8))[0]),
    0x8C: _sized("B", _text),
    ord("X"): _sized("I", _text),
    0x8D: _sized("Q", _text),
    ord("C"): _sized("B", bytes),
    ord("B"): _sized("I", bytes),
    0x8E: _sized("Q", bytes),
    0x96: _sized("Q", bytearray),
    ord("]"): lambda m: m.push([]),
    ord(")"): _push(lambda m: ()),
    ord("}"): lambda m: m.push({}),
    0x8F: lambda m: m.push(set()),
    ord("a"): lambda m: _append(m, [_value(m.pop())]),
    ord("e"): lambda m: _append(m, m.since_mark()),
    ord("s"): _set_item,
    ord("u"): lambda m: _set_items(m, m.since_mark()),
    0x90: _add_items,
    0x91: lambda m: m.push(frozenset(_keys(m.since_mark()))),
    ord("t"): lambda m: m.push(tuple(m.since_mark())),
    ord("l"): lambda m: m.push(m.since_mark()),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("q"): _put(lambda m: m.number("B")),
    ord("r"): _put(lambda m: m.number("I")),
    0x94: _put(lambda m: len(m.memo)),
    ord("h"): _push(lambda m: m.memo[m.number("B")]),
    ord("j"): _push(lambda m: m.memo[m.number("I")]),
    ord("c"): lambda m: m.find(m.line(), m.line()),
    0x93: _stack_global,
    ord("R"): lambda m: m.call(m.pop()),
    0x81: lambda m: m.call(m.pop()),  # NEWOBJ: a call of the class
    0x92: lambda m: _new_with_names(m),
    ord("b"): lambda m: m.build(),
    ord("Q"): _persistent,
    ord("0"): lambda m: m.drop(m.stack.pop()),
    ord("1"): lambda m: m.drop(*m.since_mark()),
    ord("2"): lambda m: m.stack.append(m.stack[-1]),
}
