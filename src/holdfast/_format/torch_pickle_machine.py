"""A pickle interpreter that builds plain data and nothing else.

Why not ``pickle.Unpickler`` with ``find_class`` overridden: opcodes alone can hurt, without any class. A
megabyte of nested tuples as a dict key ends the process by overflowing the C stack in ``hash``, a single
memo index takes 64 GiB, ``BUILD`` changes the stand-ins themselves, and a dict that is built into many
objects is copied into each. Checking the opcodes beforehand costs as much as interpreting them. So this
machine knows only the opcodes that Python's picklers of protocol 2 to 5 write for plain data, and each of
them takes time and memory in proportion to the bytes it stands on. What a pickle may name is for the caller
to say: ``torch_pickle_names`` for metadata, ``torch_item_reader`` for a tensor.
"""

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from holdfast._format.torch_pickle_names import (
    Built,
    Call,
    Record,
    Symbol,
    add_to_dict,
    add_to_set,
    make_frozenset,
)
from holdfast.errors import MetadataFormatError, TruncatedFileError, UnsafeMetadataError

_WAY_OUT = "Restore the file, or load another checkpoint."
_FLOAT = struct.Struct(">d")
_STOP, _MEMOIZE = pickle.STOP[0], pickle.MEMOIZE[0]
_GET_WIDTH = {pickle.BINGET[0]: 1, pickle.LONG_BINGET[0]: 4}

# These reach for code or for objects outside the pickle, whatever their operands are.
_UNSAFE = {
    getattr(pickle, name)[0]: name
    for name in (
        *("EXT1", "EXT2", "EXT4", "PERSID", "INST", "OBJ", "NEWOBJ_EX"),
        *("NEXT_BUFFER", "READONLY_BUFFER"),
    )
}


DAMAGE = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError),
    *(TypeError, ValueError, struct.error),
)
"""What running a damaged pickle can raise by chance: an empty stack, no such memo entry, bad UTF-8."""


@dataclass(slots=True, eq=False)
class Machine:
    """Runs one pickle.

    Attributes:
        data: The pickle; what follows its end is ignored.
        path: The file's name, for messages.
        allowed: The stand-in of each module and name that the pickle may ask for.
        persistent: Gives the value of a persistent id; without it there may be none.
        read_rows: Reads many opcodes at once, in place of the machine, from a position where a record is
            referred to; gives the position after them, or 0 for no.
    """

    data: bytes
    path: str
    allowed: Mapping[tuple[str, str], Record | Call | Symbol]
    persistent: Callable[[Any], Any] | None = None
    read_rows: Callable[[Record, int], int] | None = None
    pos: int = 0
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: list[Any] = field(default_factory=list)
    copied: int = 0

    def run(self) -> Any:
        """Give the object that the pickle describes.

        It is made of None, bool, int, float, str, bytes, bytearray, list, tuple, dict, OrderedDict, set,
        frozenset, the stand-ins, what these make when called, and what ``persistent`` and ``read_rows`` give.
        It may contain itself.

        Raises:
            UnsafeMetadataError: The pickle asks for something that is not allowed. Nothing of it was run.
            TruncatedFileError: The pickle has no end.
            MetadataFormatError: The pickle is damaged or uses opcodes that no torch writes.
            ArithmeticError, LookupError, TypeError, ValueError, MemoryError: The same, met by chance.
        """
        data, stack, memo, pos, end = self.data, self.stack, self.memo, 0, len(self.data)
        read_rows = self.read_rows
        while pos < end:
            opcode = data[pos]
            pos += 1
            if opcode == _MEMOIZE:
                memo.append(stack[-1])
            elif opcode in _GET_WIDTH:
                start, pos = pos, pos + _GET_WIDTH[opcode]
                value = memo[int.from_bytes(data[start:pos], "little")]
                # Instances start with their class: here a row may begin.
                after = read_rows(value, start - 1) if read_rows and type(value) is Record else 0
                if after:
                    pos = after
                else:
                    stack.append(value)
            elif opcode == _STOP:
                return stack.pop()
            else:
                handler = _HANDLERS[opcode]
                if handler is None:
                    self._refuse_opcode(opcode)
                self.pos = pos
                handler(self)
                pos = self.pos
        raise TruncatedFileError(
            f"{self.path} ends before its pickle does, at byte {end}: it was cut off. {_WAY_OUT}",
            path=self.path,
        )

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes. Raises TruncatedFileError, without taking memory, if there are fewer."""
        start = self.pos
        self.pos = stop = start + count
        if stop > len(self.data):
            raise TruncatedFileError(
                f"{self.path} ends at byte {len(self.data)}, but its pickle goes on to byte {stop} at least: "
                f"it was cut off. {_WAY_OUT}",
                path=self.path,
                expected=stop,
                found=len(self.data),
            )
        return self.data[start:stop]

    def number(self, width: int) -> int:
        """The next ``width`` bytes as an unsigned number."""
        return int.from_bytes(self.take(width), "little")

    def line(self) -> str:
        """The text up to the next line feed."""
        stop = self.data.find(b"\n", self.pos)
        return self.take((len(self.data) if stop < 0 else stop) - self.pos + 1)[:-1].decode()

    def pop(self, count: int) -> list[Any]:
        """The last ``count`` values of the stack, which loses them."""
        if len(self.stack) < count:
            self.damaged("its stack is empty")
        return self._pop_from(len(self.stack) - count)

    def pop_mark(self) -> list[Any]:
        """Everything above the last mark."""
        return self._pop_from(self.marks.pop())

    def _pop_from(self, start: int) -> list[Any]:
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def damaged(self, reason: str) -> NoReturn:
        """Raise MetadataFormatError: no pickler writes this."""
        raise MetadataFormatError(
            f"{self.path} is not a metadata pickle that torch writes: {reason} (at byte {self.pos}). "
            "The file is damaged, or something else wrote it.",
            path=self.path,
        )

    def unsafe(self, what: str) -> NoReturn:
        """Raise UnsafeMetadataError: the pickle asks for code, or for objects outside of it."""
        raise UnsafeMetadataError(
            f"{self.path} asks for {what}, which is not plain data. Nothing was run. Do not load this "
            "checkpoint with a reader that runs pickles unless you trust whoever wrote it.",
            path=self.path,
            found=what,
        )

    def _refuse_opcode(self, opcode: int) -> NoReturn:
        if opcode in _UNSAFE:
            self.unsafe(f"the pickle opcode {_UNSAFE[opcode]}")
        self.damaged(f"it has the opcode 0x{opcode:02x}")

    def find(self, module: object, name: object) -> None:
        """Push the stand-in of an allowed name; refuse any other name."""
        stand_in = self.allowed.get((module, name)) if type(module) is type(name) is str else None
        if stand_in is None:
            self.unsafe(f"{_shown(module)}.{_shown(name)}")
        self.stack.append(stand_in)

    def call(self) -> None:
        """Call a stand-in with a tuple of arguments."""
        function, args = self.pop(2)
        if type(function) is Record and type(args) is tuple and len(args) == len(function.parameters) > 0:
            built = Built(function)
            built.state = dict(zip(function.parameters, args, strict=True))
            self.stack.append(built)
            return
        if type(function) is not Call or type(args) is not tuple:
            self.unsafe(f"a call of {_shown(function)}")
        try:
            if function.copies:
                self._charge(len(args))
                self._charge(sum(map(len, args)))
            made = function.make(*args)
        except (TypeError, ValueError, LookupError) as error:
            raise UnsafeMetadataError(
                f"{self.path} calls {function.name} as no checkpoint does: {error}. Nothing was run.",
                path=self.path,
                found=function.name,
            ) from error
        self.stack.append(made)

    def _charge(self, count: int) -> None:
        # An honest pickle gives each argument to one call or two (bytes, and a bytearray of them). Without a
        # bound, a large one from the memo could be copied by every call of a few bytes.
        self.copied += count
        if self.copied > 4 * len(self.data):
            self.damaged("it copies more than it holds")

    def make_instance(self) -> None:
        """Push a blank instance of a record's class."""
        record, args = self.pop(2)
        if type(record) is not Record or args != ():
            self.unsafe(f"an instance of {_shown(record)} with arguments")
        self.stack.append(Built(record))

    def build(self) -> None:
        """Give an instance its state. The state is kept, not copied."""
        state = self.stack.pop()
        built = self.stack[-1]
        if type(built) is not Built:
            self.unsafe("a change of the state of something that is not a metadata record")
        if built.state is not None or type(state) is not built.record.state_type:
            self.damaged(f"it sets the state of a {built.record.name} twice or to a {type(state).__name__}")
        built.state = state

    def put(self, index: int) -> None:
        """Remember the top of the stack under the next index; picklers number without gaps."""
        if index != len(self.memo):
            self.damaged(f"it remembers under {index} after {len(self.memo)} values")
        self.memo.append(self.stack[-1])

    def top(self, *kinds: type) -> Any:
        """The container on top of the stack, which must be of one of these kinds."""
        target = self.stack[-1]
        if type(target) not in kinds:
            self.damaged(f"it adds to a {type(target).__name__} as if that was a {kinds[0].__name__}")
        return target

    def set_items(self, items: list[Any]) -> None:
        """Add keys and values, taken in turns from ``items``, to the dict on top of the stack."""
        target = self.top(dict, OrderedDict)
        if len(items) % 2:
            self.damaged("a key has no value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            add_to_dict(target, key, value)

    def append_items(self, items: list[Any]) -> None:
        """Add values to the list on top of the stack."""
        self.top(list).extend(items)

    def add_items(self, items: list[Any]) -> None:
        """Add members to the set on top of the stack."""
        add_to_set(self.top(set), items)

    def resolve(self, identity: object) -> Any:
        """The value that a persistent id stands for."""
        if self.persistent is None:
            self.unsafe("the pickle opcode BINPERSID")
        return self.persistent(identity)


def _shown(name: object) -> str:
    if isinstance(name, Record | Call | Symbol):
        return name.name
    return repr(name[:200])[1:-1] if type(name) is str else f"<{type(name).__name__}>"


def _proto(machine: Machine) -> None:
    version = machine.number(1)
    if version > 5:
        machine.damaged(f"it has pickle protocol {version}, newer than 5")


def _frame(machine: Machine) -> None:
    size = machine.number(8)
    if size > len(machine.data) - machine.pos:
        machine.take(size)


def _tuple_of(count: int) -> Callable[[Machine], None]:
    return _push(lambda machine: tuple(machine.pop(count)))


def _signed(width: int) -> Callable[[Machine], None]:
    return _push(lambda machine: int.from_bytes(machine.take(machine.number(width)), "little", signed=True))


def _push(make: Callable[[Machine], object]) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(make(machine))


def _text(width: int) -> Callable[[Machine], None]:
    return _push(lambda machine: machine.take(machine.number(width)).decode("utf-8", "surrogatepass"))


def _counted(width: int, make: type) -> Callable[[Machine], None]:
    return _push(lambda machine: make(machine.take(machine.number(width))))


_HANDLERS: list[Callable[[Machine], None] | None] = [None] * 256
for _opcode, _handler in {
    pickle.PROTO: _proto,
    pickle.FRAME: _frame,
    pickle.MARK: lambda machine: machine.marks.append(len(machine.stack)),
    pickle.POP: lambda machine: machine.stack.pop(),
    pickle.NONE: _push(lambda _: None),
    pickle.NEWTRUE: _push(lambda _: True),
    pickle.NEWFALSE: _push(lambda _: False),
    pickle.BININT: _push(lambda machine: int.from_bytes(machine.take(4), "little", signed=True)),
    pickle.BININT1: _push(lambda machine: machine.number(1)),
    pickle.BININT2: _push(lambda machine: machine.number(2)),
    pickle.LONG1: _signed(1),
    pickle.LONG4: _signed(4),
    pickle.BINFLOAT: _push(lambda machine: _FLOAT.unpack(machine.take(8))[0]),
    pickle.SHORT_BINUNICODE: _text(1),
    pickle.BINUNICODE: _text(4),
    pickle.BINUNICODE8: _text(8),
    pickle.SHORT_BINBYTES: _counted(1, bytes),
    pickle.BINBYTES: _counted(4, bytes),
    pickle.BINBYTES8: _counted(8, bytes),
    pickle.BYTEARRAY8: _counted(8, bytearray),
    pickle.EMPTY_LIST: _push(lambda _: []),
    pickle.EMPTY_TUPLE: _push(lambda _: ()),
    pickle.EMPTY_DICT: _push(lambda _: {}),
    pickle.EMPTY_SET: _push(lambda _: set()),
    pickle.TUPLE: _push(lambda machine: tuple(machine.pop_mark())),
    pickle.TUPLE1: _tuple_of(1),
    pickle.TUPLE2: _tuple_of(2),
    pickle.TUPLE3: _tuple_of(3),
    pickle.FROZENSET: _push(lambda machine: make_frozenset(machine.pop_mark())),
    pickle.APPEND: lambda machine: machine.append_items(machine.pop(1)),
    pickle.APPENDS: lambda machine: machine.append_items(machine.pop_mark()),
    pickle.SETITEM: lambda machine: machine.set_items(machine.pop(2)),
    pickle.SETITEMS: lambda machine: machine.set_items(machine.pop_mark()),
    pickle.ADDITEMS: lambda machine: machine.add_items(machine.pop_mark()),
    pickle.GLOBAL: lambda machine: machine.find(machine.line(), machine.line()),
    pickle.STACK_GLOBAL: lambda machine: machine.find(*machine.pop(2)),
    pickle.BINPERSID: _push(lambda machine: machine.resolve(*machine.pop(1))),
    pickle.REDUCE: Machine.call,
    pickle.NEWOBJ: Machine.make_instance,
    pickle.BUILD: Machine.build,
    pickle.BINPUT: lambda machine: machine.put(machine.number(1)),
    pickle.LONG_BINPUT: lambda machine: machine.put(machine.number(4)),
}.items():
    _HANDLERS[_opcode[0]] = _handler
